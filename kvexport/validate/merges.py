"""Whether an engine's merge is right: PyTorch's, or one that float64 could have made with float32's rounding errors.

A merge chooses: what is evicted, and what it is merged into. Where two choices are equal but for rounding, one sum in
another order takes the other, and everything about that head then differs though nothing is wrong. So a head whose
merge differs from PyTorch's is merged again in float64, once exactly and then with random errors of float32's rounding
in every operation. The engine's result has to be one of these.
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
    for i, layer in enumerate(plan.layers):
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
        for seed in range(draws):
            with torch.no_grad(), in_float64(roundings, seed):
                merged = merge_cache(*before, attributes=attributes)
            exact = [x.numpy().astype(y.dtype) for x, y in zip(merged, after, strict=True)]
            if state_difference(layer, method, after, exact, tolerance) is None:
                return roundings
    return None
