"""A checkpoint whose headers were read. A weight is a tensor in one of the files, or is computed from such tensors."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.ops.packed import PackedFormat, dequantize, pack
from kvexport.plan.cache import CachePlan, LayerGeometry
from kvexport.tensor_files.shards import TensorEntry

Array = NDArray[Any]


class Source(Protocol):
    """A weight of a checkpoint that is computed block by block, such as a packed weight, and is not a plain tensor.

    Two sources of the same weight compare equal.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [outputs, inputs] of the weight, a matrix; the outputs of several experts follow one another."""
        ...

    @property
    def packing(self) -> PackedFormat | None:
        """The packed format of the weight; None if it is stored as floats."""
        ...

    def blocks(self) -> Iterator[dict[str, Array]]:
        """Yield all rows of the weight, block by block.

        A block of a float weight has the tensor `weight` [rows, inputs] float32. A block of a packed weight has the
        tensors of `PackedFormat.tensors` without the table, in the layout of `kvexport.ops.packed.pack`. Only `zero`
        [rows, groups] has one code in each element. If the format is `ordered`, each block also has the whole `order`
        [inputs], the permutation in which columns are stored (act-order).
        """
        ...


@dataclass(frozen=True)
class Checkpoint:
    path: Path  # folder of config and tokenizer, and of the weights unless these are in a GGUF file
    config: dict[str, Any]  # content of config.json
    tensors: dict[str, TensorEntry]
    generation_config: dict[str, Any]  # content of generation_config.json; empty if there is none
    # SHA-256 (hex) over the bytes of config.json and, in the order of names, every shard's name, size and header. No
    # weight is read, so two trained versions of one architecture in files of equal sizes have the same fingerprint.
    fingerprint: str
    # Weights that are computed from tensors, such as packed weights, by the name that a float weight would have
    computed: Mapping[str, Source] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # notes on content that is not kept unchanged
    files: tuple[Path, ...] = ()  # files of all weights; none if only the config was read
    texts: tuple[Path, ...] = ()  # tokenizer files that an artifact contains as they are in the checkpoint

    def require_folder(self, purpose: str) -> None:
        if any(entry.file.suffix == ".gguf" for entry in self.tensors.values()):
            raise UsageError(
                f"{purpose} takes a checkpoint of safetensors, and the weights are in a GGUF file",
                "--set model.path=DIRECTORY of the checkpoint that the file was made of",
            )

    def facts(self) -> list[Any]:
        """Return JSON values that change when the checkpoint does: fingerprint, and size and time of every file."""
        files: list[Any] = []
        for file in sorted(self.files):
            try:
                status = file.stat()
            except FileNotFoundError:  # another process is replacing the file
                files.append((file.name, 0, 0))
            else:
                files.append((file.name, status.st_size, status.st_mtime_ns))
        return [self.fingerprint, files]


class ModelShape(NamedTuple):
    checkpoint: Checkpoint
    model: Any  # model of transformers, whose parameters are fake tensors
    mode: Any  # mode of these fake tensors
    geometry: list[LayerGeometry]  # attention of every layer
    plan: CachePlan  # caches of the layers


@dataclass(frozen=True)
class Weight:
    """A weight that the function `read` computes block by block from tensors of the checkpoint."""

    name: str  # of the parameter, or of a tensor in the checkpoint
    full_shape: tuple[int, ...]
    read: Callable[[], Iterator[dict[str, Array]]] = field(compare=False, repr=False)
    packing: PackedFormat | None = None

    @property
    def shape(self) -> tuple[int, int]:
        inputs = self.full_shape[-1] if self.full_shape else 1
        return math.prod(self.full_shape[:-1]), inputs

    def blocks(self) -> Iterator[dict[str, Array]]:
        return self.read()


def float_weight(name: str, shape: tuple[int, ...], values: Callable[[], Array]) -> Weight:
    inputs = shape[-1] if shape else 1
    return Weight(name, shape, lambda: iter([{"weight": values().reshape(-1, inputs)}]))


@dataclass(frozen=True)
class Dense:
    """A packed weight that is read as dequantized floats."""

    packed: Source
    why: str = field(default="", compare=False)  # why it is, for a note to the user
    packing: None = None

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    def blocks(self) -> Iterator[dict[str, Array]]:
        packing = self.packed.packing
        assert packing is not None
        for block in self.packed.blocks():
            if "zero" in block:
                block = {**block, "zero": pack(block["zero"], packing.bits)}
            yield {"weight": dequantize(packing, len(block[packing.scale]), self.shape[1], block)}


@dataclass(frozen=True)
class PackedExperts:
    """The packed weight [experts, outputs, inputs] of a layer's experts, in the layout of an artifact."""

    name: str  # parameter of the model
    full_shape: tuple[int, ...]
    # Matrices of the experts in the order of their rows: for example the gate and the up projection of the first
    # expert, then those of the second. All matrices have one packed format, or all are floats.
    matrices: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, int]:
        experts, outputs, inputs = self.full_shape
        return experts * outputs, inputs

    @property
    def packing(self) -> PackedFormat | None:
        return self.matrices[0].packing

    def blocks(self) -> Iterator[dict[str, Array]]:
        for matrix in self.matrices:
            yield from matrix.blocks()


def dense_values(source: Source) -> NDArray[np.float32]:
    floats = source if source.packing is None else Dense(source)
    return np.concatenate([block["weight"] for block in floats.blocks()])
