"""The blocks of quantized values in GGUF files (ggml), converted to packed weights with exactly the same values.

The library `gguf` converts blocks to floats only; here the numbers stay packed. Source of the layouts: ggml-quants.c;
tests compare them with `gguf.dequantize`. Numbers of 5 and 6 bits take 8 bits here. Each scale of the K types is a
product of two numbers and therefore float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.ops.packed import PackedFormat

Array = NDArray[Any]


class Layout(NamedTuple):
    """The layout of one ggml block type, and its conversion to packed weights.

    Attributes:
        block: NumPy's type of one block.
        packing: The format of the packed numbers.
        components: Function from an array of blocks to `weight` as stored, and flat `scale` and `minimum`.
    """

    block: np.dtype[Any]
    packing: PackedFormat
    components: Callable[[Array], dict[str, Array]]


def _pairs(numbers: Array) -> Array:
    """Pack 4-bit numbers along the last axis, two per byte."""
    packed: Array = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
    return packed


def _halves(levels: Array, width: int) -> Array:
    """Unpack 4-bit numbers: return the low 4 bits of every `width` bytes, then the high 4 bits of these bytes."""
    bytes_ = levels.reshape(len(levels), -1, 1, width)
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=2)


def _q4_0(blocks: Array) -> dict[str, Array]:
    # Four bits from which 8 is subtracted are the two's complement with the upper bit turned.
    return {"weight": _pairs(_halves(blocks["levels"], 16)) ^ 0x88, "scale": blocks["scale"]}


def _q4_1(blocks: Array) -> dict[str, Array]:
    weight = _pairs(_halves(blocks["levels"], 16))
    return {"weight": weight, "scale": blocks["scale"], "minimum": blocks["least"]}


def _fifth_bits(blocks: Array) -> Array:
    bits = (blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)) & 1
    numbers: Array = _halves(blocks["levels"], 16).reshape(-1, 32) | (bits.astype(np.uint8) << 4)
    return numbers


def _q5_0(blocks: Array) -> dict[str, Array]:
    return {"weight": _fifth_bits(blocks).view(np.int8) - np.int8(16), "scale": blocks["scale"]}


def _q5_1(blocks: Array) -> dict[str, Array]:
    return {"weight": _fifth_bits(blocks), "scale": blocks["scale"], "minimum": blocks["least"]}


def _q8_0(blocks: Array) -> dict[str, Array]:
    return {"weight": np.ascontiguousarray(blocks["levels"]), "scale": blocks["scale"]}


def _k_scales(blocks: Array) -> dict[str, Array]:
    """Return scale and minimum of the eight groups of 32 weights in each block of a ggml K type.

    Each is a 6-bit number times the block's own scale.
    """
    q = blocks["scales"]
    low, high, upper = q[:, :4], q[:, 4:8], q[:, 8:]
    scale = np.concatenate([low & 63, (upper & 15) | (low >> 6 << 4)], axis=1)
    least = np.concatenate([high & 63, (upper >> 4) | (high >> 6 << 4)], axis=1)
    return {
        "scale": blocks["scale"].astype(np.float32)[:, None] * scale.astype(np.float32),
        "minimum": -(blocks["least"].astype(np.float32)[:, None] * least.astype(np.float32)),
    }


def _q4_k(blocks: Array) -> dict[str, Array]:
    return {"weight": _pairs(_halves(blocks["levels"], 32)), **_k_scales(blocks)}


def _q5_k(blocks: Array) -> dict[str, Array]:
    bits = (blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    numbers = _halves(blocks["levels"], 32).reshape(-1, 8, 32) | (bits << 4)
    return {"weight": numbers, **_k_scales(blocks)}


def _q6_k(blocks: Array) -> dict[str, Array]:
    low = _halves(blocks["levels"], 64).reshape(-1, 8, 32)
    high = blocks["high"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    numbers = (low | (high.reshape(-1, 8, 32) << 4)).view(np.int8) - np.int8(32)
    scale = blocks["scale"].astype(np.float32)[:, None] * blocks["scales"].astype(np.float32)
    return {"weight": numbers, "scale": scale}


def _block(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_SCALE, _LEAST = ("scale", "<f2"), ("least", "<f2")
_K = (_SCALE, _LEAST, ("scales", "u1", 12))
LAYOUTS = {
    "Q4_0": Layout(_block(_SCALE, ("levels", "u1", 16)), PackedFormat(4, True, 32), _q4_0),
    "Q4_1": Layout(_block(_SCALE, _LEAST, ("levels", "u1", 16)), PackedFormat(4, False, 32, "minimum"), _q4_1),
    "Q5_0": Layout(_block(_SCALE, ("high", "<u4"), ("levels", "u1", 16)), PackedFormat(8, True, 32), _q5_0),
    "Q5_1": Layout(
        _block(_SCALE, _LEAST, ("high", "<u4"), ("levels", "u1", 16)), PackedFormat(8, False, 32, "minimum"), _q5_1
    ),
    "Q8_0": Layout(_block(_SCALE, ("levels", "i1", 32)), PackedFormat(8, True, 32), _q8_0),
    "Q4_K": Layout(_block(*_K, ("levels", "u1", 128)), PackedFormat(4, False, 32, "minimum", "float32"), _q4_k),
    "Q5_K": Layout(
        _block(*_K, ("high", "u1", 32), ("levels", "u1", 128)), PackedFormat(8, False, 32, "minimum", "float32"), _q5_k
    ),
    "Q6_K": Layout(
        _block(("levels", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE),
        PackedFormat(8, True, 16, "none", "float32"),
        _q6_k,
    ),
}
"""Layouts by ggml's name of the type."""
