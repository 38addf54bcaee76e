"""The engine's independent run over the validation sequences, on its own state as in production.

Its logits have to stay near those of PyTorch's run. Where two selections of a merge are equal except for rounding, the
two runs may select different entries and differ from there on although neither is wrong. The engine's run then
*parts* from the reference's in that lane. A parting has to be explained: right before the merge both states
agree, and from the engine's own state PyTorch makes the engine's merge, or float64 makes it with float32's rounding
errors. Logits of a parted lane are no longer compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan
from kvexport.engine.lanes import Lanes
from kvexport.methods.base import Method
from kvexport.validate.compare import Difference, Tolerance, state_difference
from kvexport.validate.divergence import kl
from kvexport.validate.merges import compare_merge
from kvexport.validate.tokens import Ids

Arrays = Mapping[str, NDArray[Any]]
Row = NDArray[np.float32]
SAME_VOTES = 1e-3  # relative; another merge target changes votes by far more


class Merge(NamedTuple):
    """One recorded merge (compression) of KV caches: the state before and after it.

    Attributes:
        first: The first merged lane.
        past: The state of the merged lanes before the merge, by the input names of merge.onnx.
        present: Their state after the merge, by its output names.
    """

    first: int
    past: Arrays
    present: Arrays

    def lane(self, lane: int) -> Merge | None:
        """Return the record of the merge for one lane of the batch; None if that lane did not merge."""
        if not self.first <= lane < self.first + len(next(iter(self.past.values()))):
            return None
        row = slice(lane - self.first, lane - self.first + 1)
        return Merge(lane, *({name: x[row] for name, x in state.items()} for state in (self.past, self.present)))


class WatchedState:
    """A wrapper of a `ModelState` (KV caches of a batch) that records the merges of the current call."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.merges: list[Merge] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def merge(self, first: int, last: int) -> None:
        """Run the wrapped state's merge of lanes first <= lane < last, and record the KV caches before and after."""
        past = {name: x[first:last] for name, x in self._state.get_state().items()}
        self._state.merge(first, last)
        present = {
            name.replace("past_key_values.", "present."): x[first:last] for name, x in self._state.get_state().items()
        }
        self.merges.append(Merge(first, past, present))


class IndependentRun:
    """The engine's own run over the validation sequences, and its distance from PyTorch's run.

    Attributes:
        lanes: The engine's lanes.
        kl: KL(PyTorch || engine) in nats for every call and lane, until the lane parts.
        logits: For each lane the engine's logits [vocabulary] by position.
        parted: For each parted lane the number of tokens that it had seen.
    """

    def __init__(self, state: Any, plan: CachePlan, method: Method, lanes: int, **options: Any) -> None:
        self._state, self._plan, self._method = WatchedState(state), plan, method
        self.lanes = Lanes(self._state, plan, lanes, **options)
        self.kl: list[float] = []
        self.logits: list[dict[int, Row]] = [{} for _ in range(lanes)]
        self.parted: dict[int, int] = {}

    def append(
        self,
        tokens: list[Ids],
        reference: NDArray[np.float32],
        reference_merges: list[Merge],
        *,
        prefill: bool,
        unread: Collection[int],
    ) -> list[tuple[int, list[Merge], list[Merge]]]:
        """Run one call of the engine's own run, and compare its logits and merges with PyTorch's.

        Args:
            tokens: Token ids for each lane; empty for a lane that takes no part.
            reference: The reference's logits of the call.
            reference_merges: The reference's merges of the call.
            prefill: Whether the tokens belong to a prompt.
            unread: Lanes whose prompts continue in the next call.

        Returns:
            The lanes that part in this call, each with its merges and the reference's.
        """
        self._state.merges.clear()
        logits = self.lanes.append(tokens, prefill=prefill, unread=unread)
        parting = []
        for lane in range(len(tokens)):
            if lane not in self.parted:
                own, expected = (
                    [merge for each in merges if (merge := each.lane(lane)) is not None]
                    for merges in (self._state.merges, reference_merges)
                )
                if not self._select_alike(own, expected):
                    self.parted[lane] = self.lanes.length[lane]
                    parting.append((lane, own, expected))
        for lane, ids in enumerate(tokens):
            if len(ids):
                row = len(ids) - 1 if logits.shape[1] > 1 else 0
                self.logits[lane][self.lanes.length[lane] - 1] = logits[lane, row].copy()
                if lane not in self.parted:
                    self.kl.append(kl(reference[lane, row], logits[lane, row]))
        return parting

    def _select_alike(self, own: list[Merge], expected: list[Merge]) -> bool:
        """Return whether engine and PyTorch evicted the same entries, into the same targets, in a call's merges."""
        layers = [(i, layer.state) for i, layer in enumerate(self._plan.caches) if layer.merges]
        return len(own) == len(expected) and all(
            np.array_equal(a.present[state[4].present(i)], b.present[state[4].present(i)])
            and np.allclose(a.present[state[2].present(i)], b.present[state[2].present(i)], rtol=SAME_VOTES)
            for a, b in zip(own, expected, strict=True)
            for i, state in layers
        )

    def unexplained(
        self,
        own: list[Merge],
        expected: list[Merge],
        merge: Callable[[Arrays], Arrays],
        tolerance: Tolerance,
        merge_tolerance: Tolerance,
    ) -> Iterator[tuple[int, Difference]]:
        """Yield the differences of a lane's merges between engine and PyTorch that rounding cannot explain.

        Args:
            own: The engine's merges of the lane in one call.
            expected: The reference's merges of the lane in that call.
            merge: PyTorch's merge, from merge.onnx's inputs to its outputs.
            tolerance: The largest difference of the two states before the first merge.
            merge_tolerance: The largest difference of two merges with the same selection.

        Yields:
            The number of the cache, and the difference.
        """
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
