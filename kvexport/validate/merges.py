"""Whether an engine's merge is right: PyTorch's, or one that float64 could have made with float32's rounding errors.

A merge chooses: what is evicted, and what it is merged into. Where two choices are equal but for rounding, one sum in
another order takes the other, and everything about that head then differs though nothing is wrong. So a head whose
merge differs from PyTorch's is merged again in float64, once exactly and then with random errors of float32's rounding
in every operation. The engine's result has to be one of these. Where many slots cost the same but for rounding (a head
that evicts next to nothing, of a layer in which equal tokens have equal values), no two draws choose alike, and no
number of them finds the engine's. Then its choice has to lie among the draws: no further from the nearest than they are
from one another, with the same rows but for those that another choice changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvexport.cache import CachePlan, LayerCache
from kvexport.export.graph.graphs import merge_attributes
from kvexport.methods.base import Method
from kvexport.ops.merge_cache import merge_cache
from kvexport.validate.compare import Difference, Tolerance, state_difference
from kvexport.validate.float64 import in_float64

Arrays = Mapping[str, NDArray[Any]]
# Roundings to float32 in every operation, and how often errors of that size are drawn. One rounding is what every
# operation may have; sums of many terms in another order, and formulas that differ, have some more.
DRAWS = ((1.0, 8), (4.0, 24), (16.0, 32))
APART = 3.0  # times as far from the middle of draws as the furthest of them: another choice
SAME = 1e-5  # of a row's norm, which float32 may add
MOST_EXAMINED = 24  # heads of one run; a wrong engine differs in most of them


@dataclass(frozen=True)
class Flip:
    """A head whose merge is not PyTorch's. roundings: of float32, with which float64 makes the engine's choice (0: it
    does so exactly); None where it never did, or was not asked. slot: the first that differs; difference and allowed:
    of the engine's from PyTorch's there."""

    layer: int
    lane: int
    head: int
    slot: int
    tensor: str
    difference: float
    allowed: float
    roundings: float | None

    @property
    def right(self) -> bool:
        """Whether the choice is one that rounding explains."""
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
    """Every head of a merge that differs from the reference's. past, engine, reference: the state before and after, as
    merge.onnx names it; lanes are counted from 0. examined: how many heads of the run float64 was asked about."""
    for i, layer in enumerate(plan.caches):
        if not layer.merges:
            continue
        for found in _differing_heads(i, layer, method, engine, reference, tolerance):
            asked = examined < MOST_EXAMINED
            examined += asked
            roundings = _explained(i, layer, method, found, past, engine, tolerance) if asked else None
            at = (i, found.lane, found.head or 0, found.slot)
            yield Flip(*at, found.tensor, found.difference, found.allowed, roundings)


def _differing_heads(
    i: int, layer: LayerCache, method: Method, engine: Arrays, reference: Arrays, tolerance: Tolerance
) -> list[Difference]:
    names = [tensor.present(i) for tensor in layer.state]
    ours, theirs = ([state[name] for name in names] for state in (engine, reference))
    if all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        return []
    lanes, heads = ours[0].shape[:2]
    return [
        found
        for lane in range(lanes)
        for head in range(heads)
        if (found := _head_difference(layer, method, ours, theirs, lane, head, tolerance))
    ]


def _head_difference(
    layer: LayerCache,
    method: Method,
    ours: Sequence[NDArray[Any]],
    theirs: Sequence[NDArray[Any]],
    lane: int,
    head: int,
    tolerance: Tolerance,
) -> Difference | None:
    one = (slice(lane, lane + 1), slice(head, head + 1))
    a, b = ([x[one] for x in state] for state in (ours, theirs))
    found = state_difference(layer, method, a, b, tolerance)
    return found and found.at(lane, head)


def _explained(
    i: int, layer: LayerCache, method: Method, found: Difference, past: Arrays, engine: Arrays, tolerance: Tolerance
) -> float | None:
    """With how many roundings float64 merges this head as the engine does; None where it does not."""
    head = found.head or 0
    one = (slice(found.lane, found.lane + 1), slice(head, head + 1))
    before = [torch.from_numpy(np.ascontiguousarray(past[tensor.past(i)][one])) for tensor in layer.state]
    after = [engine[tensor.present(i)][one] for tensor in layer.state]
    attributes = merge_attributes(layer, method)
    for roundings, draws in ((0.0, 1), *DRAWS):
        drawn = []
        for seed in range(draws):
            with torch.no_grad(), in_float64(roundings, seed):
                merged = merge_cache(*before, attributes=attributes)
            drawn.append([x.numpy().astype(y.dtype) for x, y in zip(merged, after, strict=True)])
            if state_difference(layer, method, after, drawn[-1], tolerance) is None:
                return roundings
        own, *others = ({t.name: x for t, x in zip(layer.state, state, strict=True)} for state in (after, *drawn))
        if _among(own, others):
            return roundings
    return None


def _among(engine: Arrays, draws: Sequence[Arrays]) -> bool:
    """Whether a head's merge [1, 1, ...] lies among draws of which no two choose alike, by the positions that one of
    two holds and the other does not. Of the rows whose positions all hold no more may be apart than there are of
    these."""
    rows = [{int(p): i for i, p in enumerate(x["position"][0, 0]) if x["votes"][0, 0, i] > 0} for x in (engine, *draws)]
    own, *others = rows
    if len(others) == 1 or len({frozenset(x) for x in others}) < len(others):
        return False  # draws that agree say what is right
    spread = max(len(a.keys() ^ b.keys()) for a in others for b in others)
    if min(len(own.keys() ^ other.keys()) for other in others) > spread:
        return False
    common = sorted(set(own).intersection(*others))
    apart = np.zeros(len(common), bool)
    for name in ("key", "value", "votes"):
        found, *drawn = (
            np.asarray(x[name][0, 0], np.float64).reshape(len(x["votes"][0, 0]), -1)[[at[p] for p in common]]
            for x, at in zip((engine, *draws), rows, strict=True)
        )
        middle = np.median(drawn, 0)
        differs = [np.linalg.norm(x - middle, axis=-1) for x in drawn]
        allowed = APART * np.max(differs, 0) + APART * SAME * np.linalg.norm(middle, axis=-1)
        apart |= np.linalg.norm(found - middle, axis=-1) > allowed
    return int(apart.sum()) <= spread
