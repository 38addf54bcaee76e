"""Quantizing at build: a float weight of a checkpoint, rounded to 4 or 8 bits in groups of inputs.

Each group takes, of a few scales, the one with the least squared error: its largest value goes to the lowest number, or
to a little less of it, of either sign; then the scale is fitted to the rounded numbers by least squares and they are
rounded again. Of normally distributed weights in 4 bits that has nine tenths of the squared error of the first scale
alone, and 1.02 times that of a search through 80 scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.export.casting import read_rows, row_blocks
from kvexport.export.model.tensors import TensorEntry
from kvexport.ops.packed import GROUPS, PackedFormat, pack

Floats = NDArray[np.float32]
# Of the scale that takes the largest value to the lowest number.
SHARES = {4: (1.0, 0.9, 0.8, -8 / 7, -1.0), 8: (1.0,)}
ZERO_SHARES = {4: (1.0, 0.9, 0.8), 8: (1.0,)}  # of the range from the least to the largest value
BLOCK_BYTES = 1 << 20  # in float32; what stays in the cache of one core
_LEAST_SCALE = np.float32(2.0**-24)  # of float16, so that no group that holds anything has a scale of 0


@dataclass(frozen=True)
class Rounded:
    """The weight `entry` [outputs, inputs], rounded to the numbers of `packing` as it is read."""

    entry: TensorEntry
    packing: PackedFormat

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]"""
        n, k = self.entry.shape
        return n, k

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Its rows. Raises UsageError for values that are not finite, or that float32 cannot hold."""
        n, k = self.shape
        for rows in row_blocks(n, 4 * k, BLOCK_BYTES):
            groups = read_rows(self.entry, rows).reshape(len(rows), -1, self.packing.group)
            numbers, offsets = round_groups(groups, self.packing)
            yield {"weight": pack(numbers.reshape(len(rows), k), self.packing.bits), **offsets}

    def order(self) -> NDArray[np.int64]:
        """There is none."""
        raise NotImplementedError


def fitting_group(wanted: int, inputs: int) -> int | None:
    """The largest group of at most `wanted` inputs that divides `inputs` and halves `wanted` some times; None where
    there is none."""
    while wanted >= GROUPS[0]:
        if inputs % wanted == 0:
            return wanted
        wanted //= 2
    return None


def round_groups(groups: Floats, packing: PackedFormat) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Numbers of the shape of `groups` [..., group], int8 or uint8, and scale and zero [...]."""
    low, high = packing.lowest, packing.lowest + (1 << packing.bits) - 1
    if packing.offset == "zero":
        return _with_zero(groups, high, packing)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)
    starts = [largest * np.float32(share / low) for share in SHARES[packing.bits]]
    numbers, scale, _ = _best(groups, starts, np.zeros_like(largest), low, high)
    return numbers.astype(np.int8), {"scale": scale[..., 0].astype(packing.scale_dtype)}


def _with_zero(groups: Floats, high: int, packing: PackedFormat) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    least, most = groups.min(-1, keepdims=True).clip(max=0), groups.max(-1, keepdims=True).clip(min=0)
    found = None
    for share in ZERO_SHARES[packing.bits]:
        start = _as_stored((most - least) * np.float32(share / high))
        zero = np.rint(-least * np.float32(share) / start).clip(0, high)
        tried = _best(groups, [start], zero, 0, high)
        if found is None:
            found = (*tried, zero)
        else:
            better = tried[2] < found[2]
            found = tuple(np.where(better, a, b) for a, b in zip((*tried, zero), found, strict=True))
    assert found is not None
    numbers, scale, _, zero = found
    return numbers.astype(np.uint8), {
        "scale": scale[..., 0].astype(packing.scale_dtype),
        "zero": zero[..., 0].astype(np.uint8),
    }


def _best(groups: Floats, starts: Sequence[Floats], zero: Floats, low: int, high: int) -> tuple[Floats, Floats, Floats]:
    """Of the scales that come of `starts` [..., 1] those of the least squared error: numbers, scale, error."""
    best: tuple[Floats, Floats, Floats] | None = None
    for start in starts:
        scale = _as_stored(start)
        numbers = _round(groups, scale, zero, low, high)
        centred = numbers - zero
        squares = (centred * centred).sum(-1, keepdims=True)
        fitted = _as_stored(np.divide((centred * groups).sum(-1, keepdims=True), squares, out=scale, where=squares > 0))
        numbers = _round(groups, fitted, zero, low, high)
        difference = (numbers - zero) * fitted - groups
        tried = numbers, fitted, (difference * difference).sum(-1, keepdims=True)
        if best is None:
            best = tried
        else:
            better = tried[2] < best[2]
            for kept, new in zip(best, tried, strict=True):
                np.copyto(kept, new, where=better)
    assert best is not None
    return best


def _round(groups: Floats, scale: Floats, zero: Floats, low: int, high: int) -> Floats:
    numbers: Floats = groups / scale
    numbers += zero
    np.rint(numbers, out=numbers)
    return np.clip(numbers, low, high, out=numbers)


def _as_stored(scale: Floats) -> Floats:
    """Rounded to float16, and not 0."""
    stored = scale.astype(np.float16).astype(np.float32)
    return np.where(np.abs(stored) < _LEAST_SCALE, _LEAST_SCALE, stored)
