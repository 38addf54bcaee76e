"""Weights of GGUF files that are not one matrix of the file: experts of a layer, and changed small tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvexport.errors import UsageError
from kvexport.export.model.gguf import GgufWeight
from kvexport.export.model.gguf_architectures import DOWN_EXPERTS, GATE_EXPERTS, UP_EXPERTS
from kvexport.export.model.tensors import Array, Dense, PackedExperts, Source
from kvexport.tensor_files.casting import load_tensor
from kvexport.tensor_files.entry import TensorEntry

GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class SmallTensor:
    name: str  # parameter
    parts: tuple[TensorEntry, ...]  # tensors of the same shape except for the last dimension, which are joined there
    plus: float = 0.0  # number that is added to every value
    packing: None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        return (*self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        return math.prod(self.full_shape[:-1]), self.full_shape[-1]

    def blocks(self) -> Iterator[dict[str, Array]]:
        whole = np.concatenate([load_tensor(part, "float32") for part in self.parts], axis=-1)
        yield {"weight": whole.reshape(self.shape) + np.float32(self.plus)}


def experts_of(prefix: str, stored: Mapping[tuple[str, str], TensorEntry]) -> dict[str, Source]:
    """Return the weights and biases of a GGUF layer's experts in the layout of an artifact, by parameter name."""
    gate, up, down = (_required(stored, name, prefix) for name in (GATE_EXPERTS, UP_EXPERTS, DOWN_EXPERTS))
    for entry in (gate, up, down):
        if len(entry.shape) != 3 or entry.shape[0] != down.shape[0] or (entry is up and up.shape != gate.shape):
            raise UsageError(
                f"tensor {entry.name!r} in {entry.file} has shape {list(entry.shape)}, and the experts of its layer "
                f"have {gate.name!r} {list(gate.shape)} and {down.name!r} {list(down.shape)}",
                f"download {entry.file.name} again",
            )
    count, inner, hidden = gate.shape
    sources: dict[str, Source] = {
        f"{prefix}.{GATE_UP}": _joined(f"{prefix}.{GATE_UP}", (count, 2 * inner, hidden), (gate, up)),
        f"{prefix}.{DOWN}": _joined(f"{prefix}.{DOWN}", down.shape, (down,)),
    }
    biases = [stored.get((name, "bias")) for name in (GATE_EXPERTS, UP_EXPERTS, DOWN_EXPERTS)]
    present = [bias for bias in biases if bias is not None]
    if present:
        if len(present) < len(biases):
            raise UsageError(f"the experts '{prefix}' have {len(present)} of {len(biases)} biases", "download it again")
        sources[f"{prefix}.{GATE_UP}_bias"] = SmallTensor(f"{prefix}.{GATE_UP}_bias", tuple(present[:2]))
        sources[f"{prefix}.{DOWN}_bias"] = SmallTensor(f"{prefix}.{DOWN}_bias", (present[2],))
    return sources


def _required(stored: Mapping[tuple[str, str], TensorEntry], name: str, prefix: str) -> TensorEntry:
    entry = stored.get((name, "weight"))
    if entry is None:
        names = ", ".join(sorted(repr(entry.name) for entry in stored.values()))
        raise UsageError(
            f"the file has no tensor {name}.weight for the experts '{prefix}', of which it has {names}",
            "download the file again",
        )
    return entry


def _joined(name: str, shape: tuple[int, ...], stacked: Sequence[TensorEntry]) -> PackedExperts:
    matrices: list[Source] = [
        GgufWeight(_expert(entry, i)) for i in range(shape[0]) for entry in stacked
    ]  # fmt: skip
    if len({matrix.packing for matrix in matrices}) > 1:
        matrices = [matrix if matrix.packing is None else Dense(matrix) for matrix in matrices]
    return PackedExperts(name, shape, tuple(matrices))


def _expert(entry: TensorEntry, i: int) -> TensorEntry:
    size = entry.nbytes // entry.shape[0]
    return replace(entry, shape=entry.shape[1:], offset=entry.offset + i * size, nbytes=size)
