"""Helpers that read, write and cut the saved state of one batch lane (one sequence's KV cache) in host memory.

Tensors of slots are cut to the occupied slots, which are a prefix. In a saved lane, rings of reference queries are cut
to the queries that will still be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan
from kvexport.schema.state import RING


def is_captured(first: int, last: int) -> bool:
    """Return whether the merge of lanes first <= lane < last should have a CUDA graph of its own.

    Single lanes have one, because lanes that start at different times merge one by one. Ranges from lane 0 have one,
    because a batch that starts together merges together. Other ranges rarely repeat, and there are many of them.
    """
    return first == 0 or last - first == 1


def slot_axes(plan: CachePlan) -> dict[str, int | None]:
    """Return by input name the dimension of a lane's state tensor that counts KV-cache slots; None for none."""
    axes = {
        tensor.past(i): None if tensor.slot_axis is None else tensor.slot_axis - 1
        for i, layer in enumerate(plan.caches)
        for tensor in layer.state
    }
    return axes | {tensor.past(x.place): None for x in plan.states for tensor in x.state}


def used_slots(votes: NDArray[np.float32]) -> int:
    """Return the number of KV-cache slots in use: those of the fullest head of `votes` [KV heads, slots].

    A slot is in use if its votes are above 0.
    """
    used = np.flatnonzero((votes != 0).any(axis=0))
    return int(used[-1]) + 1 if used.size else 0


def votes_names(plan: CachePlan) -> list[str]:
    """Return the graph input names of every layer's votes (the number of tokens that each KV-cache slot stands for)."""
    return [name for name, _, _, kind in plan.state_names() if kind == "votes"]


def without_last(votes: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Return the votes of a lane's KV-cache slots without the last `count` tokens of every head.

    Args:
        votes: The votes by input name, cut to the occupied slots.
        count: The number of tokens to remove.
    """
    return {name: array[:, : array.shape[1] - count] for name, array in votes.items()}


def read_used(
    plan: CachePlan, whole: Callable[[str], NDArray[Any]], names: Collection[str] | None
) -> dict[str, NDArray[Any]]:
    """Return copies of one lane's state tensors, cut to the occupied KV-cache slots.

    Args:
        plan: The cache plan.
        whole: A function that returns a tensor of the lane with all slots.
        names: The tensors to read, or None for all.
    """
    used: dict[str, int] = {}
    arrays = {}
    for name, axis in slot_axes(plan).items():
        if names is not None and name not in names:
            continue
        array = whole(name)
        if axis is not None:
            votes = name.rpartition(".")[0] + ".votes"
            if votes not in used:
                used[votes] = used_slots(whole(votes))
            array = np.moveaxis(np.moveaxis(array, axis, 0)[: used[votes]], 0, axis)
        arrays[name] = np.array(array)
    return arrays


def fill(target: NDArray[Any], values: NDArray[Any], axis: int | None) -> None:
    """Write `values` into a lane's state tensor in place; KV-cache slots beyond those of `values` become zeros."""
    if axis is None:
        target[...] = values
        return
    slots, used = np.moveaxis(target, axis, 0), values.shape[axis]
    slots[:used] = np.moveaxis(values, axis, 0)
    slots[used:] = 0


def without_replaced(plan: CachePlan, state: Mapping[str, NDArray[Any]], tokens: int) -> dict[str, NDArray[Any]]:
    """Return a lane's tensors with ring buffers of queries cut to the rows that remain after `tokens` more tokens."""
    arrays = dict(state)
    for i, layer in enumerate(plan.caches):
        rings = [tensor.past(i) for tensor in layer.state if tensor.name in RING]
        for name in rings:
            seen = state[rings[-1]][0]  # equal in all heads; the queries of one token have seen equally many tokens
            kept = max(len(seen) - tokens * np.count_nonzero(seen == seen[-1]), 0)
            arrays[name] = state[name][:, len(seen) - kept :].copy()
    return arrays


def with_whole_rings(plan: CachePlan, state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a lane's tensors with ring buffers of reference queries padded to the plan's size by empty rows."""
    arrays = dict(state)
    for i, layer in enumerate(plan.caches):
        shapes = layer.shapes(1)
        for tensor in layer.state:
            if tensor.name in RING:
                array = state[tensor.past(i)]
                missing = shapes[tensor.name][2] - array.shape[1]
                arrays[tensor.past(i)] = np.pad(array, [(0, 0), (missing, 0), *[(0, 0)] * (array.ndim - 2)])
    return arrays
