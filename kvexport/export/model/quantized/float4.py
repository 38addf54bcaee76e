"""Readers of weights in 4-bit floats: NVFP4 and MXFP4.

A 4-bit float of type E2M1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 or the negative of one of these. A byte holds two of them, the
first input in the low half. Twice each float is an integer, so such weights become packed weights with half the scale.
Their 4-bit codes are indices into a table of sixteen integers. In NVFP4 the scale of 16 inputs is an 8-bit float times
one float for the whole tensor (compressed-tensors stores the reciprocal of that float). In MXFP4 the scale of 32 inputs
is a power of two, stored as its exponent plus 127.

gpt-oss has its experts in MXFP4: `{name}_blocks` [experts, outputs, groups, 16] U8 and `{name}_scales` [experts,
outputs, groups] U8. Outputs of the gate and the up projection alternate. An artifact has the same bytes.

Sources: compressed-tensors' NVFP4PackedCompressor, ModelOpt's NVFP4QTensor, transformers' `convert_moe_packed_tensors`;
OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.quantized.reading import (
    ACTIVATIONS,
    Read,
    Tensors,
    float8_values,
    require,
    require_scales,
    require_shape,
    whole,
    wrong,
)
from kvexport.export.model.tensors import Source
from kvexport.ops.packed import E2M1, PackedFormat
from kvexport.tensor_files.casting import BLOCK_BYTES, byte_rows, read_blocks, row_blocks
from kvexport.tensor_files.shards import TensorEntry

_FP8 = "F8_E4M3"
GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
INTERLEAVED = "gate_up_proj"  # the weight in which rows of the gate and the up projection alternate
MXFP4 = PackedFormat(4, False, GROUP, "none", "uint8", table=E2M1)


@dataclass(frozen=True)
class Float4:
    """A weight of 4-bit floats (E2M1), as in NVFP4 and MXFP4.

    `total` is a scale of the whole tensor. The scales of groups are multiplied by `total`, or divided by it if
    `divides` is true.
    """

    weight: TensorEntry
    scale: TensorEntry
    total: TensorEntry | None
    divides: bool
    packing: PackedFormat

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, int]:
        n, half = self.weight.shape
        return n, 2 * half

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        n, k = self.shape
        scale = require_scales(self.scale.name, self._scales()) * np.float32(0.5)
        for rows in row_blocks(n, k // 2, BLOCK_BYTES):
            yield {"weight": byte_rows(self.weight, rows), "scale": scale[rows.start : rows.stop]}

    def _scales(self) -> NDArray[np.float32]:
        stored = np.frombuffer(b"".join(read_blocks(self.scale)), np.uint8).reshape(self.scale.shape)
        if self.scale.dtype != _FP8:
            powers = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
            scales: NDArray[np.float32] = np.where(stored == 255, np.float32(np.nan), powers)
            return scales
        scale = float8_values()[stored]
        if self.total is None:
            return scale
        total = np.float32(require_scales(self.total.name, whole(self.total)).reshape(-1)[0])
        product: NDArray[np.float32] = scale / total if self.divides else scale * total
        return product


def float4(name: str, entry: TensorEntry, tensors: Tensors, prefix: str, total: str, *, divides: bool) -> Float4:
    """Return the weight whose packed codes are the tensor `entry`: MXFP4 if its scales are integers, else NVFP4."""
    scale = require(tensors, f"{prefix}.weight_scale", name)
    if entry.dtype != "U8" or len(entry.shape) != 2:
        raise wrong(entry, "U8, a matrix")
    n, k = entry.shape[0], 2 * entry.shape[1]
    group = 32 if scale.dtype in ("U8", "F8_E8M0") else 16
    packing = PackedFormat(4, False, group, "none", "float32", table=E2M1)
    if fault := packing.fault(k):
        raise UsageError(f"tensor {entry.name!r} in {entry.file} cannot be read: {fault}", "")
    require_shape(scale, (_FP8,) if group == 16 else ("U8", "F8_E8M0"), (n, k // group))
    whole_scale = require(tensors, f"{prefix}.{total}", name) if group == 16 else None
    if whole_scale is not None and (whole_scale.dtype != "F32" or int(np.prod(whole_scale.shape)) != 1):
        raise wrong(whole_scale, "one F32")
    return Float4(entry, scale, whole_scale, divides, packing)


def read_nvfp4(_: Mapping[str, Any], tensors: Tensors) -> Read:
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name, entry in tensors.items():
        prefix = name.removesuffix(".weight")
        if prefix != name and entry.dtype == "U8":
            sources[name] = float4(name, entry, tensors, prefix, "weight_scale_2", divides=False)
            used |= {f"{prefix}.{suffix}" for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
    return sources, used, [ACTIVATIONS]


@dataclass(frozen=True)
class Mxfp4Experts:
    """The MXFP4 weight [experts, outputs, inputs] of a layer's experts, with the gate's outputs before the ups'."""

    name: str  # parameter of the model
    weight: TensorEntry  # numbers, two in a byte
    scale: TensorEntry  # exponents
    packing: PackedFormat = MXFP4  # format of the weight in an artifact

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
            stored = byte_rows(self.weight, one).reshape(outputs, inputs // 2)
            exponents = byte_rows(self.scale, one).reshape(outputs, inputs // GROUP)
            if (exponents == 255).any():
                raise UsageError(f"tensor {self.scale.name!r} has scales that are NaN", "download the checkpoint again")
            if self.name.endswith(INTERLEAVED):
                stored, exponents = (np.concatenate([x[0::2], x[1::2]]) for x in (stored, exponents))
            yield {"weight": stored, "exponent": exponents}


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
