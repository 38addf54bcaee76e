"""LoRA adapters that a build adds to the weights of a checkpoint.

For each weight W that the adapter changes, the build writes W + s B A, with the adapter's matrices A and B and its
scale s (`kvexport.tensor_files.peft`). The sum is computed block by block of rows, so no weight is in memory as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.tensors import Checkpoint, Source
from kvexport.files import json_digest
from kvexport.tensor_files.casting import load_tensor, read_rows, row_blocks
from kvexport.tensor_files.peft import CONFIG, WEIGHTS, AdapterFiles, matching_name, read_adapter
from kvexport.tensor_files.shards import TensorEntry, refuse_link, some_names


@dataclass(frozen=True)
class Adapted:
    base: TensorEntry | Source  # weight W without the adapter, in floats
    first: TensorEntry  # matrix A [rank, inputs]
    second: TensorEntry  # matrix B [outputs, rank]
    scale: float  # factor s of B A
    transposed: bool = False  # whether the checkpoint stores the weight as [inputs, outputs] (`fan_in_fan_out`)
    packing: None = None

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.base.shape
        return rows, columns

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        left, right = load_tensor(self.second, "float32"), load_tensor(self.first, "float32")
        if self.transposed:
            left, right = right.T, left.T
        begin = 0
        for rows in self._base_rows():
            change = left[begin : begin + len(rows)] @ right
            yield {"weight": rows + np.float32(self.scale) * change}
            begin += len(rows)

    def _base_rows(self) -> Iterator[NDArray[np.float32]]:
        rows, columns = self.shape
        if isinstance(self.base, TensorEntry):
            yield from (read_rows(self.base, block) for block in row_blocks(rows, 4 * columns))
        else:
            yield from (block["weight"] for block in self.base.blocks())


def merge_adapter(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    for name in (CONFIG, WEIGHTS):
        refuse_link(folder / name)
    adapter = read_adapter(folder, "--set weights.merge_adapter")
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)
    names = [*tensors, *computed]
    for module in adapter.pairs:
        tensor = matching_name(f"{module}.weight", names)
        if tensor is None:
            raise UsageError(
                f"{adapter} changes {module!r}, and the checkpoint has no tensor '{module}.weight' (it has "
                f"{some_names(names)})",
                "--set model.path=CHECKPOINT of the model that the adapter was trained on",
            )
        base = tensors.pop(tensor) if tensor in tensors else computed[tensor]
        computed[tensor] = _adapted(base, module, adapter)
    note = f"the adapter {folder.name} is added to {len(adapter.pairs)} weights"
    return replace(
        checkpoint,
        tensors=tensors,
        computed=computed,
        fingerprint=json_digest([checkpoint.fingerprint, adapter.digest]),
        notes=(*checkpoint.notes, note),
    )


def _adapted(base: TensorEntry | Source, module: str, adapter: AdapterFiles) -> Adapted:
    first, second = adapter.pairs[module]
    if not isinstance(base, TensorEntry) and base.packing is not None:
        raise UsageError(
            f"{adapter} changes {base.name!r}, which the checkpoint stores packed as {base.packing.label}",
            "--set model.path=CHECKPOINT of the same model in floats, and --set weights.bits=4 to pack the sum",
        )
    shape = tuple(base.shape)[::-1] if adapter.transposed else tuple(base.shape)
    if first.shape[1:] != shape[1:] or second.shape[:1] != shape[:1] or first.shape[:1] != second.shape[1:]:
        raise UsageError(
            f"{adapter} has matrices {list(first.shape)} and {list(second.shape)} for {module!r}, "
            f"whose weight is {list(shape)} in the checkpoint",
            "--set model.path=CHECKPOINT of the model that the adapter was trained on",
        )
    return Adapted(base, first, second, adapter.scale(module), adapter.transposed)
