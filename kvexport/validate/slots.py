"""KV caches cut to the slots that the sequences of a validation can use.

A cache that evicts nothing, or merges only at the end of a prompt, has as many slots as the longest sequence that the
artifact allows, and PyTorch copies every slot in each call. The PyTorch reference therefore has only the slots that can
be used, and a decoder call reads only the slots in use.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.plan.cache import CachePlan, LayerCache, resized, slots_of

Arrays = Mapping[str, NDArray[Any]]
MULTIPLE = 64  # numbers of slots are rounded up to a multiple of this


def used_plan(plan: CachePlan, tokens: int) -> CachePlan:
    """Return a plan with slots for about `tokens` tokens; heads of several capacities, which graphs contain, stay."""
    most = -(-tokens // MULTIPLE) * MULTIPLE

    def used(cache: LayerCache) -> LayerCache:
        return replace(cache, capacity=cache.first_slots(most)) if len({*cache.capacity}) == 1 else cache

    return replace(plan, caches=tuple(map(used, plan.caches)))


def with_slots(source: CachePlan, target: CachePlan, arrays: Arrays) -> dict[str, NDArray[Any]]:
    result = dict(arrays)
    for i, (before, after) in enumerate(zip(source.caches, target.caches, strict=True)):
        for tensor in before.state:
            for name in (tensor.past(i), tensor.present(i)):
                if tensor.slot_axis is not None and name in result:
                    result[name] = resized(result[name], tensor.slot_axis, before.capacity, after.capacity)
    return result


def has_beyond(source: CachePlan, target: CachePlan, arrays: Arrays) -> bool:
    return any(
        bool(np.moveaxis(arrays[tensor.present(i)], tensor.slot_axis, 0)[slots.start + count : slots.stop].any())
        for i, (before, after) in enumerate(zip(source.caches, target.caches, strict=True))
        for tensor in before.state
        if tensor.slot_axis is not None and tensor.present(i) in arrays
        for slots, count in zip(slots_of(before.capacity), after.capacity, strict=True)
    )


def slots_for(votes: NDArray[Any], cache: LayerCache, tokens: int) -> tuple[int, ...]:
    used = max(int((votes[:, slots] > 0).sum(-1).max(initial=0)) for slots in cache.head_slots)
    return cache.first_slots(-(-(used + tokens) // MULTIPLE) * MULTIPLE)
