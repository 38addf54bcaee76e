"""Division of state tensors among tensor-parallel ranks by KV head: heads of rank 0, then of rank 1, and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def rank_heads(state: Arrays, rank: int, ranks: int, axis: int) -> dict[str, NDArray[Any]]:
    """Return the part of every state tensor with the KV heads of one tensor-parallel rank.

    Args:
        state: The tensors over all heads.
        rank: The number of the rank.
        ranks: The number of ranks.
        axis: The dimension of heads.
    """
    return {name: np.split(x, ranks, axis)[rank] for name, x in state.items()}


def joined(tensors: Sequence[NDArray[Any]], axis: int, slots: int | None = None) -> NDArray[Any]:
    """Join the KV heads of all tensor-parallel ranks into one tensor.

    Args:
        tensors: The tensor of each rank.
        axis: The dimension of heads.
        slots: The dimension of slots if ranks may occupy different numbers of them; missing slots become zeros. None if
            the shapes are equal.
    """
    if slots is not None:
        largest = max(tensor.shape[slots] for tensor in tensors)
        tensors = [_filled(tensor, slots, largest) for tensor in tensors]
    return np.concatenate(tensors, axis)


def _filled(tensor: NDArray[Any], slots: int, count: int) -> NDArray[Any]:
    if tensor.shape[slots] == count:
        return tensor
    widths = [(0, count - tensor.shape[slots] if i == slots else 0) for i in range(tensor.ndim)]
    return np.pad(tensor, widths)
