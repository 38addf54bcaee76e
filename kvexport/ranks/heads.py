"""State tensors by ranks: KV heads are those of rank 0, then of rank 1, and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def part_of(state: Arrays, rank: int, ranks: int, axis: int) -> dict[str, NDArray[Any]]:
    """A rank's heads of every tensor. axis: the dimension of heads."""
    return {name: np.split(x, ranks, axis)[rank] for name, x in state.items()}


def joined(parts: Sequence[NDArray[Any]], axis: int, slots: int | None = None) -> NDArray[Any]:
    """A tensor of all ranks. slots: the dimension of slots, of which a rank may have used fewer than another; those
    become zeros. None: all ranks have as many."""
    if slots is not None:
        most = max(part.shape[slots] for part in parts)
        parts = [_filled(part, slots, most) for part in parts]
    return np.concatenate(parts, axis)


def _filled(part: NDArray[Any], slots: int, count: int) -> NDArray[Any]:
    if part.shape[slots] == count:
        return part
    widths = [(0, count - part.shape[slots] if i == slots else 0) for i in range(part.ndim)]
    return np.pad(part, widths)
