"""Caches cut to the slots that the sequences of a validation can use.

A cache that evicts nothing, or merges only at the end of a prompt, has as many slots as the longest sequence that the
artifact allows. PyTorch copies every slot in each call. The reference therefore has only the slots that can be used,
and a decoder call reads only the slots in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan

Arrays = Mapping[str, NDArray[Any]]
MULTIPLE = 64  # of slots


def used_plan(plan: CachePlan, tokens: int) -> CachePlan:
    """Return a cache plan whose caches have slots for at most about `tokens` tokens, and no more than in `plan`.

    Args:
        plan: The cache plan of an artifact.
        tokens: The tokens of the longest sequence, and of the padding of a call.
    """
    most = -(-tokens // MULTIPLE) * MULTIPLE
    return replace(plan, caches=tuple(replace(x, capacity=min(x.capacity, most)) for x in plan.caches))


def with_slots(plan: CachePlan, arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return arrays whose state tensors have the slots of `plan`: slots are cut off, or empty slots are added.

    Args:
        plan: The cache plan.
        arrays: State tensors by their names in ONNX graphs, and other arrays, which stay unchanged.
    """
    result = dict(arrays)
    for i, layer in enumerate(plan.caches):
        for tensor in layer.state:
            for name in (tensor.past(i), tensor.present(i)):
                if tensor.slot_axis is not None and name in result:
                    result[name] = resized(result[name], tensor.slot_axis, layer.capacity)
    return result


def has_beyond(plan: CachePlan, arrays: Arrays) -> bool:
    """Return whether state tensors have nonzero numbers in slots beyond those of `plan`."""
    return any(
        bool(np.moveaxis(arrays[tensor.present(i)], tensor.slot_axis, 0)[layer.capacity :].any())
        for i, layer in enumerate(plan.caches)
        for tensor in layer.state
        if tensor.slot_axis is not None and tensor.present(i) in arrays
    )


def slots_for(votes: NDArray[Any], tokens: int) -> int:
    """Return the number of slots that a call needs, at most the capacity.

    Args:
        votes: [B, H, C], the votes before the call.
        tokens: The tokens of the call.
    """
    used = int((votes > 0).sum(-1).max(initial=0))
    return int(min(votes.shape[-1], -(-(used + tokens) // MULTIPLE) * MULTIPLE))


def resized(x: NDArray[Any], axis: int, slots: int) -> NDArray[Any]:
    """Return a tensor with `slots` slots along an axis: the last slots are cut off, or empty ones are added."""
    if x.shape[axis] == slots:
        return x
    kept = x[(slice(None),) * axis + (slice(0, slots),)]
    if kept.shape[axis] == slots:
        return np.ascontiguousarray(kept)
    shape = list(x.shape)
    shape[axis] = slots
    wider = np.zeros(shape, x.dtype)
    wider[(slice(None),) * axis + (slice(0, kept.shape[axis]),)] = kept
    return wider
