"""Helpers that read, write and cut the saved state (KV cache) of one batch lane in host memory.

A saved tensor with a dimension of slots keeps only the first slots of each KV head: as many as the fullest KV head of
the layer occupies, or all slots of a head with a smaller capacity (`LayerCache.first_slots`). Ring buffers of reference
queries (recent queries that some compression methods keep) are cut to the queries that later merges still read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.plan.cache import CachePlan, LayerCache, resized, slots_of
from kvexport.schema.state import RING


def is_captured(first: int, last: int) -> bool:
    """Return whether compressing the caches of batch lanes first <= lane < last should have its own CUDA graph.

    Single lanes and ranges from lane 0 are compressed again and again; the many other ranges rarely repeat.
    """
    return first == 0 or last - first == 1


class SlotPlace(NamedTuple):
    axis: int | None
    cache: LayerCache | None


def slot_places(plan: CachePlan) -> dict[str, SlotPlace]:
    places = {
        tensor.past(i): SlotPlace(None if tensor.slot_axis is None else tensor.slot_axis - 1, layer)
        for i, layer in enumerate(plan.caches)
        for tensor in layer.state
    }
    return places | {tensor.past(x.place): SlotPlace(None, None) for x in plan.states for tensor in x.state}


def used_slots(votes: NDArray[np.float32], capacity: Sequence[int]) -> int:
    if len({*capacity}) == 1:
        used = np.flatnonzero((votes.reshape(len(capacity), -1) != 0).any(axis=0))
        return int(used[-1]) + 1 if used.size else 0
    return max(used_slots(votes[slots], (slots.stop - slots.start,)) for slots in slots_of(capacity))


def votes_names(plan: CachePlan) -> list[str]:
    return [name for name, _, _, kind in plan.state_names() if kind == "votes"]


def without_last(plan: CachePlan, votes: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    places, result = slot_places(plan), {}
    for name, array in votes.items():
        cache = places[name].cache
        assert cache is not None
        heads = array.reshape(cache.kv_heads, -1)
        result[name] = heads[:, : heads.shape[1] - count].reshape(-1)
    return result


def read_used(
    plan: CachePlan, whole: Callable[[str], NDArray[Any]], names: Collection[str] | None
) -> dict[str, NDArray[Any]]:
    used: dict[str, tuple[int, ...]] = {}
    arrays = {}
    for name, (axis, cache) in slot_places(plan).items():
        if names is not None and name not in names:
            continue
        array = whole(name)
        if axis is not None and cache is not None:
            votes = name.rpartition(".")[0] + ".votes"
            if votes not in used:
                used[votes] = cache.first_slots(used_slots(whole(votes), cache.capacity))
            array = resized(array, axis, cache.capacity, used[votes])
        arrays[name] = np.array(array)
    return arrays


def fill(target: NDArray[Any], values: NDArray[Any], place: SlotPlace) -> None:
    if place.axis is None or place.cache is None:
        target[...] = values
        return
    cache, axis = place.cache, place.axis
    before = cache.first_slots(cache.most_of(values.shape[axis]))
    target[...] = resized(values, axis, before, cache.capacity)


def without_replaced(plan: CachePlan, state: Mapping[str, NDArray[Any]], tokens: int) -> dict[str, NDArray[Any]]:
    arrays = dict(state)
    for i, layer in enumerate(plan.caches):
        rings = [tensor.past(i) for tensor in layer.state if tensor.name in RING]
        for name in rings:
            seen = state[rings[-1]][0]  # tokens that each query has seen, equal in all heads and in one token's queries
            kept = max(len(seen) - tokens * np.count_nonzero(seen == seen[-1]), 0)
            arrays[name] = state[name][:, len(seen) - kept :].copy()
    return arrays


def with_whole_rings(plan: CachePlan, state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    arrays = dict(state)
    for i, layer in enumerate(plan.caches):
        shapes = layer.shapes(1)
        for tensor in layer.state:
            if tensor.name in RING:
                array = state[tensor.past(i)]
                missing = shapes[tensor.name][2] - array.shape[1]
                arrays[tensor.past(i)] = np.pad(array, [(0, 0), (missing, 0), *[(0, 0)] * (array.ndim - 2)])
    return arrays
