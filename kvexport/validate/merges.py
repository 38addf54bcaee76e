"""Checks that an engine's merge of KV caches equals PyTorch's, or that float32 rounding explains the difference.

A merge selects the entries to evict and their merge targets (the kept entries that take them in). If two selections are
equally good except for rounding, another order of summation may pick the other one, and the whole KV head then differs
although nothing is wrong. Each differing head is therefore merged again in float64: once exactly, and then several
times with random errors of the size of float32's rounding. The engine's result has to equal one of these random merges.

In some heads evictions of many slots cost the same except for rounding, as in a head that evicts almost nothing, where
equal tokens have equal values. No two random merges agree there, and none would equal the engine's. The engine's result
must then be no farther from PyTorch's merge in float32, or from the nearest random merge, than the random merges are
from one another. It must also have the same rows, except for as many as another selection changes. PyTorch's own merge
in float32 may be farther from all random merges than these are from one another: costs that differ in float64 may be
equal in float32, and the order of slots then decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvexport.export.graph.graphs import merge_attributes
from kvexport.methods.base import Method
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.plan.cache import CachePlan, LayerCache
from kvexport.schema.state import StateTensor
from kvexport.validate.compare import Difference, Tolerance, heads_difference, named_heads, named_views
from kvexport.validate.float64 import in_float64

Arrays = Mapping[str, NDArray[Any]]
# (error of every operation in float32 roundings, number of random merges). Every operation may be off by one rounding.
# Sums of many terms in another order, and other formulas of the same meaning, are off by more.
DRAWS = ((1.0, 8), (4.0, 24), (16.0, 32))
# Random merges are lanes of one call with at most this many slots. With few slots, the time to start each PyTorch
# operation dominates; more slots would take memory and save no time.
SLOTS_AT_ONCE = 4096
APART = 3.0  # a row this many times farther from the random merges' median than any of them is another selection
SAME = 1e-5  # the difference that float32 may add to a row, relative to the row's norm
MOST_EXAMINED = 24  # most KV heads that a run merges again in float64; a wrong engine differs in most heads


@dataclass(frozen=True)
class Flip:
    layer: int  # number of the cache
    lane: int  # row of the batch
    head: int  # KV head
    slot: int  # first slot that differs
    tensor: str  # first tensor that differs
    difference: float  # difference from PyTorch at that slot
    allowed: float  # tolerance at that slot
    # The size of error, in float32 roundings, with which float64 makes the engine's selection (0: without any error).
    # None if float64 never made that selection, or was not tried
    roundings: float | None

    @property
    def right(self) -> bool:
        return self.roundings is not None


def compare_merge(
    plan: CachePlan,
    method: Method,
    past: Arrays,
    engine: Arrays,
    reference: Arrays,
    tolerance: Tolerance,
    examined: int,
) -> Iterator[Flip]:
    for i, layer in enumerate(plan.caches):
        if not layer.merges:
            continue
        for difference in _differing_heads(i, layer, method, engine, reference, tolerance):
            is_examined = examined < MOST_EXAMINED
            examined += is_examined
            roundings = None
            if is_examined:
                roundings = _explained(i, layer, method, difference, past, engine, reference, tolerance)
            place = (i, difference.lane, difference.head or 0, difference.slot)
            yield Flip(*place, difference.tensor, difference.difference, difference.allowed, roundings)


def _differing_heads(
    i: int, layer: LayerCache, method: Method, engine: Arrays, reference: Arrays, tolerance: Tolerance
) -> list[Difference]:
    names = [tensor.present(i) for tensor in layer.state]
    actual, expected = ([state[name] for name in names] for state in (engine, reference))
    if all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True)):
        return []
    found = []
    for lane in range(len(actual[0])):
        head = 0
        for both in zip(named_heads(layer, actual), named_heads(layer, expected), strict=True):
            for own in range(both[0]["votes"].shape[1]):
                a, b = ({name: x[lane : lane + 1, own : own + 1] for name, x in state.items()} for state in both)
                if difference := heads_difference(method, a, b, tolerance):
                    found.append(replace(difference, lane=lane, head=head))
                head += 1
    return found


def _explained(
    i: int,
    layer: LayerCache,
    method: Method,
    difference: Difference,
    past: Arrays,
    engine: Arrays,
    reference: Arrays,
    tolerance: Tolerance,
) -> float | None:
    """Return the random error, in float32 roundings, with which float64 merges a head as the engine did; or None."""
    head = difference.head or 0

    def of_head(tensor: StateTensor, x: NDArray[Any]) -> NDArray[Any]:
        return layer.of_head(tensor, x[difference.lane : difference.lane + 1], head)

    before = [torch.from_numpy(np.ascontiguousarray(of_head(x, past[x.past(i)]))) for x in layer.state]
    after = [of_head(x, engine[x.present(i)]) for x in layer.state]
    single = {x.name: of_head(x, reference[x.present(i)]) for x in layer.state}
    attributes = merge_attributes(layer, method)[head]
    for roundings, draws in ((0.0, 1), *DRAWS):
        drawn = []
        for draw in _draws(attributes, before, roundings, draws):
            drawn.append([x.astype(y.dtype) for x, y in zip(draw, after, strict=True)])
            own, other = (named_views(layer, state) for state in (after, drawn[-1]))
            if heads_difference(method, own, other, tolerance) is None:
                return roundings
        engines, *others = ({t.name: x for t, x in zip(layer.state, state, strict=True)} for state in (after, *drawn))
        if _among(engines, others, single):
            return roundings
    return None


def _draws(
    attributes: MergeCacheAttributes, before: Sequence[torch.Tensor], roundings: float, count: int
) -> Iterator[list[NDArray[Any]]]:
    at_once = max(1, SLOTS_AT_ONCE // before[2].shape[2])
    for first in range(0, count, at_once):
        lanes = [x.expand(min(at_once, count - first), *x.shape[1:]).contiguous() for x in before]
        with torch.no_grad(), in_float64(roundings, seed=first):
            merged = merge_cache(*lanes, attributes=attributes)
        for lane in range(len(lanes[0])):
            yield [x[lane : lane + 1].numpy() for x in merged]


def _among(engine: Arrays, draws: Sequence[Arrays], single: Arrays) -> bool:
    """Return whether the engine's merge of one KV head [1, 1, ...] could be one of the random float64 merges."""
    every = (single, engine, *draws)
    in_float32, *rows = [
        {int(p): i for i, p in enumerate(x["position"][0, 0]) if x["votes"][0, 0, i] > 0} for x in every
    ]
    own, *others = rows
    if len(others) == 1 or len({frozenset(x) for x in others}) < len(others):
        return False  # if two random merges agree, the engine has to agree with one of them
    spread = max(len(a.keys() ^ b.keys()) for a in others for b in others)
    if min(len(own.keys() ^ other.keys()) for other in (in_float32, *others)) > spread:
        return False
    common = sorted(set(own).intersection(*others))
    apart = np.zeros(len(common), bool)
    for name in ("key", "value", "votes"):
        engine_rows, *drawn = (
            np.asarray(x[name][0, 0], np.float64).reshape(len(x["votes"][0, 0]), -1)[[at[p] for p in common]]
            for x, at in zip((engine, *draws), rows, strict=True)
        )
        middle = np.median(drawn, 0)
        differs = [np.linalg.norm(x - middle, axis=-1) for x in drawn]
        allowed = APART * np.max(differs, 0) + APART * SAME * np.linalg.norm(middle, axis=-1)
        apart |= np.linalg.norm(engine_rows - middle, axis=-1) > allowed
    return int(apart.sum()) <= spread
