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

from collections.abc import Iterator, Mapping
from functools import partial
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
from kvexport.export.model.tensors import Source, Weight
from kvexport.ops.packed import E2M1, PackedFormat
from kvexport.tensor_files.casting import BLOCK_BYTES, byte_rows, read_blocks, row_blocks
from kvexport.tensor_files.shards import TensorEntry

_FP8 = "F8_E4M3"
GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
INTERLEAVED = "gate_up_proj"  # the weight in which rows of the gate and the up projection alternate
MXFP4 = PackedFormat(4, False, GROUP, "none", "uint8", table=E2M1)


def _float4_blocks(
    weight: TensorEntry, scale: TensorEntry, total: TensorEntry | None, *, divides: bool
) -> Iterator[dict[str, NDArray[Any]]]:
    scales = require_scales(scale.name, _scales(scale, total, divides=divides)) * np.float32(0.5)
    for rows in row_blocks(weight.shape[0], weight.shape[1], BLOCK_BYTES):
        yield {"weight": byte_rows(weight, rows), "scale": scales[rows.start : rows.stop]}


def _scales(scale: TensorEntry, total: TensorEntry | None, *, divides: bool) -> NDArray[np.float32]:
    """Return the scales of groups, multiplied by the scale `total` of the whole tensor, or divided by it."""
    stored = np.frombuffer(b"".join(read_blocks(scale)), np.uint8).reshape(scale.shape)
    if scale.dtype != _FP8:
        powers = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
        scales: NDArray[np.float32] = np.where(stored == 255, np.float32(np.nan), powers)
        return scales
    if total is None:
        return float8_values()[stored]
    factor = np.float32(require_scales(total.name, whole(total)).reshape(-1)[0])
    product: NDArray[np.float32] = float8_values()[stored] / factor if divides else float8_values()[stored] * factor
    return product


def float4(name: str, entry: TensorEntry, tensors: Tensors, prefix: str, total: str, *, divides: bool) -> Weight:
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
    blocks = partial(_float4_blocks, entry, scale, whole_scale, divides=divides)
    return Weight(entry.name, (n, k), blocks, packing)


def read_nvfp4(_: Mapping[str, Any], tensors: Tensors) -> Read:
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name, entry in tensors.items():
        prefix = name.removesuffix(".weight")
        if prefix != name and entry.dtype == "U8":
            sources[name] = float4(name, entry, tensors, prefix, "weight_scale_2", divides=False)
            used |= {f"{prefix}.{suffix}" for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
    return sources, used, [ACTIVATIONS]


def _mxfp4_blocks(name: str, weight: TensorEntry, scale: TensorEntry) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the weights of a layer's experts, one expert after another, with the gate's outputs before the ups'."""
    experts, outputs, groups, _ = weight.shape
    for expert in range(experts):
        one = range(expert, expert + 1)
        stored = byte_rows(weight, one).reshape(outputs, groups * GROUP // 2)
        exponents = byte_rows(scale, one).reshape(outputs, groups)
        if (exponents == 255).any():
            raise UsageError(f"tensor {scale.name!r} has scales that are NaN", "download the checkpoint again")
        if name.endswith(INTERLEAVED):
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
        shape = (*entry.shape[:2], entry.shape[2] * GROUP)
        sources[parameter] = Weight(parameter, shape, partial(_mxfp4_blocks, parameter, entry, scale), MXFP4)
        used |= {name, scale.name}
    return sources, used, []
