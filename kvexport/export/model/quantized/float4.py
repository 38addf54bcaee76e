"""Readers of weights in 4-bit floats: NVFP4, MXFP4, and bitsandbytes' NF4 and FP4.

A 4-bit float of type E2M1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 or the negative of one of these. A byte holds two of them, the
first input in the low half. Twice each number is an integer, so NVFP4 and MXFP4 weights become packed weights with half
the scale, whose numbers are 4-bit indices into a table of sixteen integers. In NVFP4 the scale of 16 inputs is an 8-bit
float times one float for the whole tensor (compressed-tensors stores the reciprocal of that float). In MXFP4 the scale
of 32 inputs is a power of two.

The sixteen numbers of bitsandbytes are a table of floats. Its blocks of 64 numbers run over the flattened matrix, with
the first number of a byte in the high half. bitsandbytes' weights are therefore cast to floats. Sources:
compressed-tensors' NVFP4PackedCompressor, ModelOpt's NVFP4QTensor, bitsandbytes' QuantState and dequantize_4bit; OCP
Microscaling Formats 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.quantized.reading import (
    ACTIVATIONS,
    Read,
    Tensors,
    float8_values,
    refused,
    require,
    require_scales,
    require_shape,
    whole,
    wrong,
)
from kvexport.export.model.tensors import Source
from kvexport.ops.packed import E2M1, PackedFormat
from kvexport.tensor_files.casting import BLOCK_BYTES, read_at, read_blocks, row_blocks
from kvexport.tensor_files.entry import TensorEntry

_FP8 = "F8_E4M3"


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
            with self.weight.file.open("rb") as stream:
                stored = np.frombuffer(read_at(self.weight, stream, rows), np.uint8).reshape(len(rows), -1)
            yield {"weight": stored, "scale": scale[rows.start : rows.stop]}

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

    def order(self) -> NDArray[np.int64]:
        raise NotImplementedError


def float4(name: str, entry: TensorEntry, tensors: Tensors, prefix: str, total: str, *, divides: bool) -> Float4:
    """Return the 4-bit float weight (MXFP4 or NVFP4) of a module whose packed numbers are the tensor `entry`.

    The weight is MXFP4 if its scales are integers. Otherwise it is NVFP4 with a scale for the whole tensor, named
    `total`.
    """
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
    return (
        sources,
        used,
        [ACTIVATIONS],
    )


@dataclass(frozen=True)
class TableOf16:
    """A bitsandbytes weight [outputs, inputs] of 4-bit indices into a table of 16 floats; it is read as floats."""

    weight: TensorEntry
    table: TensorEntry
    scale: TensorEntry
    nested: tuple[TensorEntry, TensorEntry] | None  # table and scales of the scales, if these are quantized too
    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float  # number that is added to quantized scales
    packing: None = None

    @property
    def name(self) -> str:
        return self.weight.name

    @cached_property
    def _scales(self) -> NDArray[np.float32]:
        scale = whole(self.scale).reshape(-1)
        if self.nested is not None:
            table, own = map(whole, self.nested)
            scale = table[scale] * np.repeat(own, self.nested_block)[: scale.size] + np.float32(self.offset)
        return scale.astype(np.float32)

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        (n, k), table = self.shape, whole(self.table).astype(np.float32)
        scale = self._scales
        for rows in row_blocks(n, 4 * k, BLOCK_BYTES):
            first, end = rows.start * k, rows.stop * k
            with self.weight.file.open("rb") as stream:
                stored = np.frombuffer(read_at(self.weight, stream, range(first // 2, end // 2)), np.uint8)
            numbers = np.stack([stored >> 4, stored & 15], axis=-1).reshape(-1)
            values = table[numbers] * scale[np.arange(first, end) // self.block]
            yield {"weight": values.reshape(len(rows), k)}

    def order(self) -> NDArray[np.int64]:
        raise NotImplementedError


def read_bitsandbytes(config: Mapping[str, Any], tensors: Tensors) -> Read:
    """Return the 4-bit weights of a bitsandbytes checkpoint, which are cast to floats when the artifact is written."""
    if not config.get("load_in_4bit"):
        raise refused("bitsandbytes of 8 bits")
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name in tensors:
        kind = next(
            (kind for kind in ("nf4", "fp4") if name.endswith(f".weight.quant_state.bitsandbytes__{kind}")), None
        )
        if kind is not None:
            weight = name.removesuffix(f".quant_state.bitsandbytes__{kind}")
            sources[weight] = _table_of_16(tensors, weight, tensors[name])
            used |= {other for other in tensors if other == weight or other.startswith(f"{weight}.")}
    note = (
        f"{len(sources)} weights in bitsandbytes' 4 bits are cast to model.dtype, or rounded where weights.bits says so"
    )
    return sources, used, [note]


def _table_of_16(tensors: Tensors, name: str, state: TensorEntry) -> TableOf16:
    try:
        fields = json.loads(b"".join(read_blocks(state)))
        n, k = (int(size) for size in fields["shape"])
        block, nested_block = int(fields["blocksize"]), int(fields.get("nested_blocksize", 0))
        offset = float(fields["nested_offset"]) if nested_block else 0.0
    except (ValueError, KeyError, TypeError) as error:
        raise wrong(state, f"what bitsandbytes writes of a weight ({type(error).__name__}: {error})") from error
    weight = require(tensors, name, state.name)
    if min(n, k, block) < 1 or nested_block < 0 or k % 2:
        raise wrong(state, "sizes above 0, an even number of inputs")
    blocks = -(-n * k // block)
    require_shape(weight, ("U8",), (n * k // 2, 1))
    table, scale = (require(tensors, f"{name}.{suffix}", name) for suffix in ("quant_map", "absmax"))
    require_shape(table, ("F32",), (16,))
    require_shape(scale, ("U8",) if nested_block else ("F32",), (blocks,))
    nested = None
    if nested_block:
        nested = (require(tensors, f"{name}.nested_quant_map", name), require(tensors, f"{name}.nested_absmax", name))
        require_shape(nested[0], ("F32",), (256,))
        require_shape(nested[1], ("F32",), (-(-blocks // nested_block),))
    return TableOf16(weight, table, scale, nested, (n, k), block, nested_block, offset)
