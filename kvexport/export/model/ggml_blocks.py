"""The blocks of quantized values in GGUF files (ggml), converted to packed weights with exactly the same values.

The library `gguf` can only convert blocks to floats; here the numbers and their scales stay packed. Numbers of 2 and 3
bits take 4 bits in a packed weight, and scales of 4 and 6 bits take 8. ggml's K types subtract minimums and a packed
weight adds them, so the float by which all minimums of a block are multiplied (the super-scale) is negated. Source of
the layouts: ggml-quants.c; tests compare the values with `gguf.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.ops.packed import E2M1, IQ4, PackedFormat, pack_high

Array = NDArray[Any]


class Layout(NamedTuple):
    block: np.dtype[Any]  # the type of one block in numpy
    packing: PackedFormat
    # A function from an array of blocks to the stored tensors of the packed weight, block by block
    components: Callable[[Array], dict[str, Array]]


def _pairs(numbers: Array) -> Array:
    """Pack 4-bit numbers along the last axis, two per byte."""
    packed: Array = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
    return packed


def _halves(levels: Array, width: int) -> Array:
    """Unpack 4-bit numbers: return the low 4 bits of every `width` bytes, then the high 4 bits of the same bytes."""
    bytes_ = levels.reshape(len(levels), -1, 1, width)
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=2)


def _q4_0(blocks: Array) -> dict[str, Array]:
    # Four bits from which 8 is subtracted become two's complement by inverting the upper bit.
    return {"weight": _pairs(_halves(blocks["levels"], 16)) ^ 0x88, "scale": blocks["scale"]}


def _nibbles(blocks: Array) -> dict[str, Array]:
    scale = "exponent" if "exponent" in (blocks.dtype.names or ()) else "scale"
    return {"weight": _pairs(_halves(blocks["levels"], 16)), scale: blocks[scale]}


def _q4_1(blocks: Array) -> dict[str, Array]:
    return {**_nibbles(blocks), "minimum": blocks["least"]}


def _fifth_bits(blocks: Array) -> Array:
    bits = (blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return pack_high(bits.astype(np.uint8) << 4, 1)


def _q5_0(blocks: Array) -> dict[str, Array]:
    return {**_nibbles(blocks), "high": _fifth_bits(blocks)}


def _q5_1(blocks: Array) -> dict[str, Array]:
    return {**_q4_1(blocks), "high": _fifth_bits(blocks)}


def _q8_0(blocks: Array) -> dict[str, Array]:
    return {"weight": np.ascontiguousarray(blocks["levels"]), "scale": blocks["scale"]}


def _supers(blocks: Array) -> dict[str, Array]:
    return {"super_scale": blocks["scale"], "super_minimum": -blocks["least"]}


def _k_scales(blocks: Array) -> dict[str, Array]:
    """Return scale and minimum of the eight groups of 32 weights in each block of a ggml K type."""
    q = blocks["scales"]
    low, high, upper = q[:, :4], q[:, 4:8], q[:, 8:]
    scale = np.concatenate([low & 63, (upper & 15) | (low >> 6 << 4)], axis=1)
    least = np.concatenate([high & 63, (upper >> 4) | (high >> 6 << 4)], axis=1)
    return {"scale": scale, "minimum": least, **_supers(blocks)}


def _q4_k(blocks: Array) -> dict[str, Array]:
    return {"weight": _pairs(_halves(blocks["levels"], 32)), **_k_scales(blocks)}


def _q5_k(blocks: Array) -> dict[str, Array]:
    bits = (blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return {**_q4_k(blocks), "high": pack_high(bits << 4, 1)}


def _q6_k(blocks: Array) -> dict[str, Array]:
    upper = blocks["high"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return {
        "weight": _pairs(_halves(blocks["levels"], 64)),
        "scale": blocks["scales"],
        "super_scale": blocks["scale"],
        "high": pack_high(upper << 4, 2),
    }


def _quarters(levels: Array) -> Array:
    """Unpack 2-bit numbers: from every 32 bytes take bits 0 and 1 of each byte, then bits 2 and 3, and so on."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    numbers: Array = levels.reshape(len(levels), -1, 1, 32) >> shifts & 3
    return numbers.reshape(len(levels), 256)


def _q2_k(blocks: Array) -> dict[str, Array]:
    weight = _pairs(_quarters(blocks["levels"]))
    return {"weight": weight, "scale": blocks["scales"] & 15, "minimum": blocks["scales"] >> 4, **_supers(blocks)}


def _q3_k(blocks: Array) -> dict[str, Array]:
    q = blocks["scales"]
    low = (q[:, None, :8] >> np.array([0, 4], np.uint8)[:, None]).reshape(-1, 16) & 15
    high = (q[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]).reshape(-1, 16) & 3
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    bits = (blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    numbers = _quarters(blocks["levels"]) - ((bits ^ 1) << 2)
    return {"weight": _pairs(numbers & 15), "scale": scales, "super_scale": blocks["scale"]}


def _iq4_xs(blocks: Array) -> dict[str, Array]:
    groups = np.arange(8, dtype=np.uint16)
    low = blocks["low"].repeat(2, axis=1) >> (groups % 2 * 4).astype(np.uint8) & 15
    high = blocks["high"][:, None] >> groups * 2 & 3
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return {"weight": _pairs(_halves(blocks["levels"], 16)), "scale": scales, "super_scale": blocks["scale"]}


def _block(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_SCALE, _LEAST = ("scale", "<f2"), ("least", "<f2")
_K = (_SCALE, _LEAST, ("scales", "u1", 12))
LAYOUTS = {
    "Q2_K": Layout(
        _block(("scales", "u1", 16), ("levels", "u1", 64), _SCALE, _LEAST),
        PackedFormat(4, False, 16, "minimum", "int8"),
        _q2_k,
    ),
    "Q3_K": Layout(
        _block(("high", "u1", 32), ("levels", "u1", 64), ("scales", "u1", 12), _SCALE),
        PackedFormat(4, True, 16, "none", "int8"),
        _q3_k,
    ),
    "IQ4_NL": Layout(_block(_SCALE, ("levels", "u1", 16)), PackedFormat(4, False, 32, table=IQ4), _nibbles),
    "IQ4_XS": Layout(
        _block(_SCALE, ("high", "<u2"), ("low", "u1", 4), ("levels", "u1", 128)),
        PackedFormat(4, False, 32, "none", "int8", table=IQ4),
        _iq4_xs,
    ),
    "MXFP4": Layout(
        _block(("exponent", "u1"), ("levels", "u1", 16)),
        PackedFormat(4, False, 32, "none", "uint8", table=E2M1),
        _nibbles,
    ),
    "Q4_0": Layout(_block(_SCALE, ("levels", "u1", 16)), PackedFormat(4, True, 32), _q4_0),
    "Q4_1": Layout(_block(_SCALE, _LEAST, ("levels", "u1", 16)), PackedFormat(4, False, 32, "minimum"), _q4_1),
    "Q5_0": Layout(_block(_SCALE, ("high", "<u4"), ("levels", "u1", 16)), PackedFormat(5, True, 32), _q5_0),
    "Q5_1": Layout(
        _block(_SCALE, _LEAST, ("high", "<u4"), ("levels", "u1", 16)), PackedFormat(5, False, 32, "minimum"), _q5_1
    ),
    "Q8_0": Layout(_block(_SCALE, ("levels", "i1", 32)), PackedFormat(8, True, 32), _q8_0),
    "Q4_K": Layout(_block(*_K, ("levels", "u1", 128)), PackedFormat(4, False, 32, "minimum", "int8"), _q4_k),
    "Q5_K": Layout(
        _block(*_K, ("high", "u1", 32), ("levels", "u1", 128)), PackedFormat(5, False, 32, "minimum", "int8"), _q5_k
    ),
    "Q6_K": Layout(
        _block(("levels", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE),
        PackedFormat(6, True, 16, "none", "int8"),
        _q6_k,
    ),
}
"""The layout of each block type, by ggml's name of the type."""
