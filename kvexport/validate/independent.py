"""The engine's independent run over the validation sequences, on its own state as in production.

The engine's logits have to stay near those of PyTorch's run. If two selections of entries to evict are equally good
except for rounding, the two runs may evict different entries and differ from then on, although neither is wrong. The
engine's run then *parts* from PyTorch's run in that lane. A parting has to be explained: both states agree right before
the merge, and PyTorch makes the engine's merge from the engine's state, in float32 or in float64 with float32's
rounding errors. PyTorch's run then takes over the engine's state of the KV caches in which the two selections differ,
so that later logits are comparable again. Without an explanation the logits of the lane are no longer compared.

Positions and votes (the number of tokens that a slot stands for) do not show every difference of selections. For
example, if two slots already have the most votes that the method allows, an entry that merges into either of them
changes the votes of neither. But a merge takes means of rows (keys and values), so it hardly magnifies a difference
between rows. If the rows of a KV head differ far more after a merge than any of its rows did before, this therefore
counts as another selection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.engine.lanes import Lanes
from kvexport.images.rows import CallImages
from kvexport.methods.base import Method
from kvexport.plan.cache import CachePlan, LayerCache
from kvexport.validate.compare import Difference, Tolerance, named_heads, norm, state_difference
from kvexport.validate.divergence import kl
from kvexport.validate.merges import compare_merge
from kvexport.validate.slots import with_slots
from kvexport.validate.tokens import Ids

Arrays = Mapping[str, NDArray[Any]]
Row = NDArray[np.float32]
SAME_VOTES = 1e-3  # relative difference up to which votes count as equal
MAGNIFIED = 10.0  # allowed difference of rows after a merge, as a multiple of that before, or of the tolerance


class Merge(NamedTuple):
    first: int  # first merged lane
    past: Arrays  # state of the merged lanes before the merge, by the input names of merge.onnx
    present: Arrays  # state of the merged lanes after the merge, by the output names of merge.onnx

    def lane(self, lane: int) -> Merge | None:
        if not self.first <= lane < self.first + len(next(iter(self.past.values()))):
            return None
        row = slice(lane - self.first, lane - self.first + 1)
        return Merge(lane, *({name: x[row] for name, x in state.items()} for state in (self.past, self.present)))


class Parting(NamedTuple):
    """A call in which the engine and PyTorch evict different entries from the KV cache of one sequence."""

    lane: int
    own: list[Merge]  # engine's merges of the lane in this call
    expected: list[Merge]  # reference's merges of the lane in this call
    caches: list[int]  # numbers of the caches in which the selections differ


class WatchedState:
    def __init__(self, state: Any, source: CachePlan, plan: CachePlan) -> None:
        self._state, self._source, self._plan = state, source, plan
        self.merges: list[Merge] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def merge(self, first: int, last: int) -> None:
        past = self.lane_states(first, last)
        self._state.merge(first, last)
        present = {name.replace("past_key_values.", "present."): x for name, x in self.lane_states(first, last).items()}
        self.merges.append(Merge(first, past, present))

    def lane_states(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        return with_slots(
            self._source, self._plan, {name: x[first:last] for name, x in self._state.get_state().items()}
        )


class IndependentRun:
    def __init__(
        self,
        state: WatchedState,
        plan: CachePlan,
        used: CachePlan,
        method: Method,
        lanes: int,
        tolerance: Tolerance,
        **options: Any,
    ) -> None:
        self._state, self._plan, self._method, self._tolerance = state, used, method, tolerance
        self.lanes = Lanes(self._state, plan, lanes, **options)
        self.kl: list[float] = []
        self.logits: list[dict[int, Row]] = [{} for _ in range(lanes)]
        self.parted: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    def append(
        self,
        tokens: list[Ids],
        reference: NDArray[np.float32],
        reference_merges: list[Merge],
        *,
        prefill: bool,
        unread: Collection[int],
        images: CallImages | None = None,
    ) -> list[Parting]:
        """Run one call of the engine on its own KV caches, and compare its logits and merges with PyTorch's."""
        self._state.merges.clear()
        logits = self.lanes.append(tokens, prefill=prefill, unread=unread, images=images)
        parting: dict[int, Parting] = {}
        for lane in range(len(tokens)):
            if lane not in self.ended:
                own, expected = (
                    [merge for each in merges if (merge := each.lane(lane)) is not None]
                    for merges in (self._state.merges, reference_merges)
                )
                if caches := self._selected_otherwise(own, expected):
                    self.parted.setdefault(lane, []).append(self.lanes.length[lane])
                    parting[lane] = Parting(lane, own, expected, caches)
        for lane, ids in enumerate(tokens):
            if len(ids):
                row = len(ids) - 1 if logits.shape[1] > 1 else 0
                self.logits[lane][self.lanes.length[lane] - 1] = logits[lane, row].copy()
                if lane not in self.ended and lane not in parting:
                    self.kl.append(kl(reference[lane, row], logits[lane, row]))
        return list(parting.values())

    def state(self, lane: int, caches: Collection[int]) -> dict[str, NDArray[Any]]:
        names = {tensor.past(i) for i in caches for tensor in self._plan.caches[i].state}
        return {name: x for name, x in self._state.lane_states(lane, lane + 1).items() if name in names}

    def _selected_otherwise(self, own: list[Merge], expected: list[Merge]) -> list[int]:
        layers = [(i, layer) for i, layer in enumerate(self._plan.caches) if layer.merges]
        if len(own) != len(expected):
            return [i for i, _ in layers]
        pairs = list(zip(own, expected, strict=True))
        return [i for i, layer in layers if not all(self._merged_alike(i, layer, a, b) for a, b in pairs)]

    def _merged_alike(self, i: int, layer: LayerCache, own: Merge, expected: Merge) -> bool:
        before, after = ([run.past for run in (own, expected)], [run.present for run in (own, expected)])
        positions, votes = ([state[layer.state[n].present(i)] for state in after] for n in (4, 2))
        if not (np.array_equal(positions[0], positions[1]) and np.allclose(votes[0], votes[1], rtol=SAME_VOTES)):
            return False
        least = self._tolerance.vectors
        past = zip(*(named_heads(layer, [x[t.past(i)] for t in layer.state]) for x in before), strict=True)
        present = zip(*(named_heads(layer, [x[t.present(i)] for t in layer.state]) for x in after), strict=True)
        return all(
            bool((_row_differences(*new) <= MAGNIFIED * np.maximum(_row_differences(*old), least)).all())
            for old, new in zip(past, present, strict=True)
        )

    def unexplained(
        self,
        own: list[Merge],
        expected: list[Merge],
        merge: Callable[[Arrays], Arrays],
        tolerance: Tolerance,
        merge_tolerance: Tolerance,
    ) -> Iterator[tuple[int, Difference]]:
        if len(own) != len(expected):
            yield 0, Difference("merges", abs(len(own) - len(expected)), 0.0, 0, None, 0)
        for each, other in list(zip(own, expected, strict=False))[:1]:
            for i, layer in enumerate(self._plan.caches):
                actual, reference = ([run.past[tensor.past(i)] for tensor in layer.state] for run in (each, other))
                if difference := state_difference(layer, self._method, actual, reference, tolerance):
                    yield i, difference
        for each in own:
            inputs = {
                n: np.ascontiguousarray(each.past[n]) for n, _, layer, _ in self._plan.state_names() if layer.merges
            }
            right = merge(inputs)
            for flip in compare_merge(self._plan, self._method, inputs, each.present, right, merge_tolerance, 0):
                if not flip.right:
                    at = Difference(flip.tensor, flip.difference, flip.allowed, 0, flip.head, flip.slot)
                    yield flip.layer, replace(at, lane=flip.lane)


def _row_differences(own: Arrays, expected: Arrays) -> NDArray[np.float64]:
    largest: list[NDArray[Any]] = []
    for name in ("key", "value"):
        a, b = (x[name].astype(np.float64) for x in (own, expected))
        largest.append((norm(a - b) / np.maximum(norm(b), 1e-30)).max(-1))
    result: NDArray[np.float64] = np.maximum(*largest)
    return result
