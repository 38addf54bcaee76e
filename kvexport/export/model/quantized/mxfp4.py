"""Experts in MXFP4, as gpt-oss has them: E2M1 numbers in blocks of 32 inputs, with a power of two for each block.

A checkpoint has `{name}_blocks` [experts, outputs, groups, 16] U8, two numbers in a byte, the first input in the low
half, and `{name}_scales` [experts, outputs, groups] U8, the exponents plus 127. Rows of the gate and the up projection
alternate. An artifact has the same bytes, and a table of the doubled numbers, which are integers. Sources:
transformers' `convert_moe_packed_tensors`; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.quantized.reading import Read, Tensors, require, require_shape, wrong
from kvexport.export.model.tensors import Source
from kvexport.ops.packed import E2M1, PackedFormat
from kvexport.tensor_files.casting import read_at
from kvexport.tensor_files.entry import TensorEntry

GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
INTERLEAVED = "gate_up_proj"  # the weight in which rows of the gate and the up projection alternate
PACKING = PackedFormat(4, False, GROUP, "none", "uint8", table=E2M1)


@dataclass(frozen=True)
class Mxfp4Experts:
    """The MXFP4 weight [experts, outputs, inputs] of a layer's experts, with gate rows before up rows."""

    name: str  # parameter of the model
    weight: TensorEntry  # numbers, two in a byte
    scale: TensorEntry  # exponents
    packing: PackedFormat = PACKING  # format of the weight in an artifact

    @property
    def full_shape(self) -> tuple[int, int, int]:
        experts, outputs, groups, _ = self.weight.shape
        return experts, outputs, groups * GROUP

    @property
    def shape(self) -> tuple[int, int]:
        experts, outputs, inputs = self.full_shape
        return experts * outputs, inputs

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        experts, outputs, inputs = self.full_shape
        for expert in range(experts):
            one = range(expert, expert + 1)
            stored = self._read(self.weight, one).reshape(outputs, inputs // 2)
            exponents = self._read(self.scale, one).reshape(outputs, inputs // GROUP)
            if (exponents == 255).any():
                raise UsageError(f"tensor {self.scale.name!r} has scales that are NaN", "download the checkpoint again")
            if self.name.endswith(INTERLEAVED):
                stored, exponents = (np.concatenate([x[0::2], x[1::2]]) for x in (stored, exponents))
            yield {"weight": stored, "exponent": exponents}

    def order(self) -> NDArray[np.int64]:
        raise NotImplementedError

    @staticmethod
    def _read(entry: TensorEntry, rows: range) -> NDArray[np.uint8]:
        with entry.file.open("rb") as stream:
            return np.frombuffer(read_at(entry, stream, rows), np.uint8)


def read_mxfp4(_: Mapping[str, Any], tensors: Tensors) -> Read:
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name, entry in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        parameter = name.removesuffix(BLOCKS)
        if entry.dtype != "U8" or len(entry.shape) != 4 or entry.shape[3] != GROUP // 2:
            raise wrong(entry, f"U8 [experts, outputs, groups, {GROUP // 2}]")
        scale = require(tensors, parameter + SCALES, name)
        require_shape(scale, ("U8",), entry.shape[:3])
        sources[parameter] = Mxfp4Experts(parameter, entry, scale)
        used |= {name, scale.name}
    return sources, used, []
