"""The blocks of quantized values in GGUF files (ggml), converted to packed weights with exactly the same values.

The library `gguf` can only convert blocks to floats; here the integer codes and their scales stay packed. Scales of 6
bits take 8 in a packed weight, but for those of Q3_K. ggml's K types subtract minimums and a packed weight adds them,
so the float by which all minimums of a block are multiplied (the super-scale) is negated. Source of the layouts:
ggml-quants.c; tests compare the values with `gguf.dequantize`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.ops.packed import E2M1, IQ4, PackedFormat, pack_sixes

Array = NDArray[Any]


class Layout(NamedTuple):
    block: np.dtype[Any]  # the type of one block in numpy
    packing: PackedFormat
    # A function from an array of blocks to the stored tensors of the packed weight, block by block
    components: Callable[[Array], dict[str, Array]]


def _pairs(parts: Sequence[Array], width: int) -> Array:
    """Pack 4-bit codes two per byte, `width` codes from each of `parts` in turn.

    `parts` are flat arrays with one code in each byte, seen as elements of two bytes (uint16). Few large arrays of wide
    elements make packing several times as fast as operations on single codes.
    """
    run = np.dtype(f"V{width // 2}")
    packed = np.empty((len(parts[0]) * 2 // width, len(parts)), run)
    for i, numbers in enumerate(parts):
        packed[:, i] = (numbers | numbers >> 4).astype(np.uint8).view(run)
    return packed.view(np.uint8)


def _words(stored: Array, dtype: str = "<u2") -> Array:
    return np.ascontiguousarray(stored).reshape(-1).view(dtype)


def _nibbles_of(levels: Array, width: int) -> Array:
    """Repack 4-bit codes: of every `width` bytes the low 4 bits, then the high 4 bits of the same bytes."""
    words = _words(levels)
    return _pairs((words & 0x0F0F, words >> 4 & 0x0F0F), width)


def _fields(stored: Array, bits: int) -> Array:
    """Convert 1-bit or 2-bit fields from ggml's order to that of `kvexport.ops.packed.unpack_fields`.

    In ggml's order, 32 bytes hold the fields of 32 * 8 / bits inputs. The lowest `bits` bits of byte i belong to input
    i,
    the next bits to input 32 + i, and so on. In the result, byte i of every four bytes has the fields of the inputs i,
    i + 4, i + 8 and so on.
    """
    count = 8 // bits
    words = _words(stored, "<u4").reshape(-1, 8 // count, count)
    fields = [words[..., i].copy() for i in range(count)]
    for shift, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        step = shift // bits
        for i in range(count):
            if step and not i & step:
                moved = (fields[i] >> shift ^ fields[i + step]) & np.uint32(mask)
                fields[i] ^= moved << shift
                fields[i + step] ^= moved
    packed: Array = np.stack(fields, axis=1).reshape(len(stored), -1).view(np.uint8)
    return packed


def _q4_0(blocks: Array) -> dict[str, Array]:
    # Four bits from which 8 is subtracted become two's complement by inverting the upper bit.
    return {"weight": _nibbles_of(blocks["levels"], 16) ^ 0x88, "scale": blocks["scale"]}


def _nibbles(blocks: Array) -> dict[str, Array]:
    scale = "exponent" if "exponent" in (blocks.dtype.names or ()) else "scale"
    return {"weight": _nibbles_of(blocks["levels"], 16), scale: blocks[scale]}


def _q4_1(blocks: Array) -> dict[str, Array]:
    return {**_nibbles(blocks), "minimum": blocks["least"]}


def _fifth_bits(blocks: Array) -> Array:
    """Repack fifth bits for `kvexport.ops.packed.unpack_fields`: bit 4 t + i becomes bit t of byte i."""
    bits = blocks["high"].copy()
    for upper, lower in ((4, 1), (3, 0), (2, 1), (1, 0)):  # exchanges two binary digits of every bit's number
        mask = np.uint32(sum(1 << bit for bit in range(32) if bit >> lower & 1 and not bit >> upper & 1))
        shift = (1 << upper) - (1 << lower)
        moved = (bits >> shift ^ bits) & mask
        bits ^= moved ^ moved << shift
    packed: Array = bits.view(np.uint8).reshape(len(blocks), 4)
    return packed


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
    low, high, upper = _words(blocks["scales"], "<u4").reshape(-1, 3).T
    six, four, two = (np.uint32(mask) for mask in (0x3F3F3F3F, 0x0F0F0F0F, 0x30303030))
    scale = np.stack([low & six, upper & four | low >> 2 & two], axis=1).view(np.uint8)
    least = np.stack([high & six, upper >> 4 & four | high >> 2 & two], axis=1).view(np.uint8)
    return {"scale": scale, "minimum": least, **_supers(blocks)}


def _q4_k(blocks: Array) -> dict[str, Array]:
    return {"weight": _nibbles_of(blocks["levels"], 32), **_k_scales(blocks)}


def _q5_k(blocks: Array) -> dict[str, Array]:
    return {**_q4_k(blocks), "high": _fields(blocks["high"], 1)}


def _q6_k(blocks: Array) -> dict[str, Array]:
    return {
        "weight": _nibbles_of(blocks["levels"], 64),
        "scale": blocks["scales"],
        "super_scale": blocks["scale"],
        "high": _fields(blocks["high"], 2),
    }


def _q2_k(blocks: Array) -> dict[str, Array]:
    low, high = (_words(blocks["scales"]) >> shift & 0x0F0F for shift in (0, 4))
    return {
        "weight": _fields(blocks["levels"], 2),
        "scale": (low | low >> 4).astype(np.uint8).reshape(len(blocks), -1),
        "minimum": (high | high >> 4).astype(np.uint8).reshape(len(blocks), -1),
        **_supers(blocks),
    }


def _q3_k(blocks: Array) -> dict[str, Array]:
    q = blocks["scales"]
    low = (q[:, None, :8] >> np.array([0, 4], np.uint8)[:, None]).reshape(-1, 16) & 15
    high = (q[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]).reshape(-1, 16) & 3
    return {
        "weight": _fields(blocks["levels"], 2),
        "scale": pack_sixes(low | high << 4),
        "super_scale": blocks["scale"],
        "high": _fields(blocks["high"], 1),
    }


def _iq4_xs(blocks: Array) -> dict[str, Array]:
    groups = np.arange(8, dtype=np.uint16)
    low = blocks["low"].repeat(2, axis=1) >> (groups % 2 * 4).astype(np.uint8) & 15
    high = blocks["high"][:, None] >> groups * 2 & 3
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return {"weight": _nibbles_of(blocks["levels"], 16), "scale": scales, "super_scale": blocks["scale"]}


def _block(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_SCALE, _LEAST = ("scale", "<f2"), ("least", "<f2")
_K = (_SCALE, _LEAST, ("scales", "u1", 12))
LAYOUTS = {
    "Q2_K": Layout(
        _block(("scales", "u1", 16), ("levels", "u1", 64), _SCALE, _LEAST),
        PackedFormat(2, False, 16, "minimum", "uint4"), _q2_k,
    ),
    "Q3_K": Layout(
        _block(("high", "u1", 32), ("levels", "u1", 64), ("scales", "u1", 12), _SCALE),
        PackedFormat(3, True, 16, "none", "int6"), _q3_k,
    ),
    "IQ4_NL": Layout(_block(_SCALE, ("levels", "u1", 16)), PackedFormat(4, False, 32, table=IQ4), _nibbles),
    "IQ4_XS": Layout(
        _block(_SCALE, ("high", "<u2"), ("low", "u1", 4), ("levels", "u1", 128)),
        PackedFormat(4, False, 32, "none", "int8", table=IQ4), _iq4_xs,
    ),
    "MXFP4": Layout(
        _block(("exponent", "u1"), ("levels", "u1", 16)), PackedFormat(4, False, 32, "none", "uint8", table=E2M1),
        _nibbles,
    ),
    "Q4_0": Layout(_block(_SCALE, ("levels", "u1", 16)), PackedFormat(4, True, 32), _q4_0),
    "Q4_1": Layout(_block(_SCALE, _LEAST, ("levels", "u1", 16)), PackedFormat(4, False, 32, "minimum"), _q4_1),
    "Q5_0": Layout(_block(_SCALE, ("high", "<u4"), ("levels", "u1", 16)), PackedFormat(5, True, 32), _q5_0),
    "Q5_1": Layout(
        _block(_SCALE, _LEAST, ("high", "<u4"), ("levels", "u1", 16)), PackedFormat(5, False, 32, "minimum"), _q5_1,
    ),
    "Q8_0": Layout(_block(_SCALE, ("levels", "i1", 32)), PackedFormat(8, True, 32), _q8_0),
    "Q4_K": Layout(_block(*_K, ("levels", "u1", 128)), PackedFormat(4, False, 32, "minimum", "int8"), _q4_k),
    "Q5_K": Layout(
        _block(*_K, ("high", "u1", 32), ("levels", "u1", 128)), PackedFormat(5, False, 32, "minimum", "int8"), _q5_k,
    ),
    "Q6_K": Layout(
        _block(("levels", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE),
        PackedFormat(6, True, 16, "none", "int8"), _q6_k,
    ),
}  # fmt: skip
"""The layout of each block type, by ggml's name of the type."""
