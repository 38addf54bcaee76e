"""LoRA adapters that requests choose at run time: their matrices as inputs of the decoder's ONNX graph.

For each adapted projection the decoder takes two matrices. `first` [R, inputs] is the LoRA matrices A of all adapters,
one below the other, where R is the sum of the adapters' ranks. `second` [R, outputs] is their transposed matrices B,
multiplied with each adapter's LoRA scale. The decoder's input `adapter_rows` [B, 1, R] has a 1 at the ranks of the
adapter that each batch lane uses, and a 0 elsewhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.tensor_files.casting import load_tensor
from kvexport.tensor_files.peft import AdapterFiles, matching_name, read_adapter
from kvexport.tensor_files.shards import some_names
from kvexport.terminal import say

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest
    from kvexport.recipe.fields import Recipe

ROWS = "adapter_rows"


def first_input(module: str) -> str:
    return f"adapters.{module}.first"


def second_input(module: str) -> str:
    return f"adapters.{module}.second"


def largest_bytes(recipe: Recipe, targets: Mapping[str, tuple[int, int]]) -> int:
    rows = 1 + recipe.adapters.count * recipe.adapters.rank
    return rows * sum(map(sum, targets.values())) * np.dtype(recipe.model.dtype).itemsize if targets else 0


@dataclass(frozen=True)
class Adapter:
    name: str  # name that requests use
    digest: str  # SHA-256 of the adapter's files. Snapshots of sequences that the adapter computed contain it.
    rows: range  # rows that the adapter has in the matrices of all adapters


@dataclass(frozen=True)
class Adapters:
    by_name: Mapping[str, Adapter] = field(default_factory=dict)
    # The LoRA matrices of all adapters, by the name of the decoder's input. Row 0 contains zeros and belongs to no
    # adapter: decoder calls in which no lane uses an adapter read only this row.
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return 1 + sum(len(adapter.rows) for adapter in self.by_name.values())

    @property
    def dtype(self) -> np.dtype[Any]:
        return next(iter(self.tensors.values())).dtype

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.tensors.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.tensors:
            return {}
        return {ROWS: (1, 1, self.rows), **{name: array.shape for name, array in self.tensors.items()}}

    def unused(self, batch: int) -> dict[str, NDArray[Any]]:
        if not self.tensors:
            return {}
        rows = np.zeros((batch, 1, 1), self.dtype)
        return {ROWS: rows, **{name: array[:1] for name, array in self.tensors.items()}}

    def get(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if name not in self.by_name:
            short = name[:80]
            raise UsageError(
                f"there is no adapter {short!r} here, but {some_names(self.by_name)}",
                f"kvexport.load(PATH, adapters={{{short!r}: FOLDER}}), or --adapter {shlex.quote(short)}=FOLDER",
            )
        return self.by_name[name]

    def of_digest(self, digest: str | None) -> Adapter | None:
        return next((adapter for adapter in self.by_name.values() if adapter.digest == digest), None)


def load_adapters(manifest: Manifest, folders: Mapping[str, str | Path]) -> Adapters:
    section, targets = manifest.recipe.adapters, manifest.adapters
    if len(folders) > section.count:
        raise UsageError(
            f"the artifact takes {section.count or 'no'} adapters, and {len(folders)} were given",
            manifest.build_command(f"adapters.count={len(folders)}"),
        )
    dtype = np.dtype(manifest.recipe.model.dtype)
    adapters: dict[str, Adapter] = {}
    files = {name: read_adapter(Path(folder), f"--adapter {name}") for name, folder in folders.items()}
    rows = 1
    for name, adapter in files.items():
        rank = _rank(adapter, manifest)
        adapters[name] = Adapter(name, adapter.digest, range(rows, rows + rank))
        rows += rank
    tensors = {
        key: np.zeros((rows, size), dtype)
        for module, sizes in targets.items()
        for key, size in zip((first_input(module), second_input(module)), sizes, strict=True)
    }
    for name, adapter in files.items():
        _fill(tensors, adapter, adapters[name].rows, targets)
        if (base := _short(adapter.base)) and base != _short(manifest.recipe.model.path):
            say(f"note: {adapter} is applied to {manifest.recipe.model.path}: they fit by shape, but not by name")
    return Adapters(adapters, tensors)


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")


def _rank(adapter: AdapterFiles, manifest: Manifest) -> int:
    section = manifest.recipe.adapters
    rank = max(first.shape[0] for first, _ in adapter.pairs.values())
    if rank > section.rank:
        raise UsageError(
            f"{adapter} has rank {rank}, and the artifact takes ranks up to {section.rank}",
            manifest.build_command(f"adapters.count={section.count}", f"adapters.rank={rank}"),
        )
    return rank


def _fill(
    tensors: Mapping[str, NDArray[Any]], adapter: AdapterFiles, rows: range, targets: Mapping[str, tuple[int, int]]
) -> None:
    for module, (first, second) in adapter.pairs.items():
        name = matching_name(module, targets)
        if name is None:
            projections = ", ".join(sorted({target.rpartition(".")[2] for target in targets}))
            raise UsageError(
                f"{adapter} changes {module!r}, and the artifact takes adapters of {projections} in "
                f"its {len({target.rpartition('.')[0] for target in targets})} blocks",
                "--set adapters.targets=null or an adapter of this model",
            )
        inputs, outputs = targets[name]
        if (first.shape, second.shape) != ((first.shape[0], inputs), (outputs, first.shape[0])):
            raise UsageError(
                f"{adapter} has matrices {list(first.shape)} and {list(second.shape)} for "
                f"{module!r}, which has {inputs} inputs and {outputs} outputs in the artifact",
                "an adapter that was trained on this model",
            )
        own = slice(rows.start, rows.start + first.shape[0])
        tensors[first_input(name)][own] = load_tensor(first, "float32")
        with np.errstate(over="ignore"):
            tensors[second_input(name)][own] = (adapter.scale(module) * load_tensor(second, "float32")).T
        if not all(np.isfinite(tensors[key(name)][own]).all() for key in (first_input, second_input)):
            raise UsageError(
                f"{adapter} has values for {module!r} that exceed the largest {tensors[first_input(name)].dtype}",
                "--set model.dtype=float32",
            )
