"""The state of one lane in the host's memory: of tensors of slots the used ones alone, which are a prefix; of rings of
reference queries, where they are saved, those that are still read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan
from kvexport.schema.state import RING


def is_captured(first: int, last: int) -> bool:
    """Whether merging lanes first <= lane < last is worth a CUDA graph of its own: of one lane, as lanes that came one
    by one are merged, and of the first ones, as a batch that came together is. Other neighbours that are due in the
    same step are seldom so again, and there are many more of them."""
    return first == 0 or last - first == 1


def slot_axes(plan: CachePlan) -> dict[str, int | None]:
    """Of every state tensor, by its input name, the dimension of a lane's array that counts slots; None where there is
    none."""
    return {
        tensor.past(i): None if tensor.slot_axis is None else tensor.slot_axis - 1
        for i, layer in enumerate(plan.caches)
        for tensor in layer.state
    }


def used_slots(votes: NDArray[np.float32]) -> int:
    """How many slots the fullest head of `votes` [KV heads, slots] uses."""
    used = np.flatnonzero((votes != 0).any(axis=0))
    return int(used[-1]) + 1 if used.size else 0


def votes_names(plan: CachePlan) -> list[str]:
    """The input names of every layer's votes."""
    return [name for name, _, _, kind in plan.state_names() if kind == "votes"]


def without_last(votes: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """A lane's votes, of used slots alone, as they were before the last `count` tokens of every head."""
    return {name: array[:, : array.shape[1] - count] for name, array in votes.items()}


def read_used(
    plan: CachePlan, whole: Callable[[str], NDArray[Any]], names: Collection[str] | None
) -> dict[str, NDArray[Any]]:
    """Copies of a lane's tensors. whole(name): one of them with all its slots. names: those that are wanted, None:
    all."""
    used: dict[str, int] = {}
    found = {}
    for name, axis in slot_axes(plan).items():
        if names is not None and name not in names:
            continue
        array = whole(name)
        if axis is not None:
            votes = name.rpartition(".")[0] + ".votes"
            if votes not in used:
                used[votes] = used_slots(whole(votes))
            array = np.moveaxis(np.moveaxis(array, axis, 0)[: used[votes]], 0, axis)
        found[name] = np.array(array)
    return found


def fill(target: NDArray[Any], values: NDArray[Any], axis: int | None) -> None:
    """Write a lane's tensor in place; slots beyond those of `values` become zeros."""
    if axis is None:
        target[...] = values
        return
    slots, used = np.moveaxis(target, axis, 0), values.shape[axis]
    slots[:used] = np.moveaxis(values, axis, 0)
    slots[used:] = 0


def without_replaced(plan: CachePlan, state: Mapping[str, NDArray[Any]], tokens: int) -> dict[str, NDArray[Any]]:
    """A lane's tensors, of rings without the queries that so many more tokens replace."""
    found = dict(state)
    for i, layer in enumerate(plan.caches):
        rings = [tensor.past(i) for tensor in layer.state if tensor.name in RING]
        for name in rings:
            seen = state[rings[-1]][0]  # as in all heads: the queries of one token have seen as many
            kept = max(len(seen) - tokens * np.count_nonzero(seen == seen[-1]), 0)
            found[name] = state[name][:, len(seen) - kept :].copy()
    return found


def with_whole_rings(plan: CachePlan, state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A lane's tensors, with rows that hold no query where a ring has fewer than the plan says."""
    found = dict(state)
    for i, layer in enumerate(plan.caches):
        shapes = layer.shapes(1)
        for tensor in layer.state:
            if tensor.name in RING:
                array = state[tensor.past(i)]
                missing = shapes[tensor.name][2] - array.shape[1]
                found[tensor.past(i)] = np.pad(array, [(0, 0), (missing, 0), *[(0, 0)] * (array.ndim - 2)])
    return found
