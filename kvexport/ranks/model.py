"""The sessions and the state of an artifact of several ranks, as an engine drives those of one process.

Every call of the state is one of all ranks. What is read or written of a cache is the whole (`kvexport.ranks.heads`).
Logits are rank 0's; all ranks compute the same.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.base import Memory, ModelState
from kvexport.backends.lane_state import slot_axes
from kvexport.backends.rows import Rows
from kvexport.cache import CachePlan
from kvexport.ranks.channel import Message
from kvexport.ranks.heads import Arrays, joined, part_of
from kvexport.ranks.processes import Ranks

T = TypeVar("T")


class RankedModel:
    """See `LoadedModel`."""

    def __init__(self, ranks: Ranks, manifest: Manifest) -> None:
        self.ranks, self.plan = ranks, manifest.cache
        self.all_logits: bool = ranks.model.all_logits
        self.dropped: deque[int] = deque()  # numbers of states that nobody holds any more
        self.numbers = itertools.count()

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> RankedState:
        """See `LoadedModel`; the plan is the artifact's, and recipes that ask for a memory are refused with ranks."""
        assert plan == self.plan, "ranks hold the artifact's own caches alone"
        number = next(self.numbers)
        own = self.ranks.call(
            partial(self.ranks.model.new_state, self.ranks.manifest.cache, lanes),
            self.message("new_state", {"state": number, "lanes": lanes}),
        )
        return RankedState(self, number, own)

    def message(self, name: str, values: Mapping[str, Any], arrays: Arrays | None = None) -> Message:
        """For all ranks, which let go of states that nobody holds any more."""
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        return Message(name, {**values, "dropped": dropped}, arrays or {})


class RankedState(ModelState):
    """See `ModelState`."""

    def __init__(self, model: RankedModel, number: int, own: ModelState) -> None:
        self._model, self._number, self._own = model, number, own
        self._slots = slot_axes(model.plan)
        self.top_logits = own.top_logits
        weakref.finalize(self, model.dropped.append, number).atexit = False

    def _call(self, work: Callable[[], T], name: str, arrays: Arrays | None = None, **values: Any) -> T:
        message = self._model.message(name, {"state": self._number, **values}, arrays)
        return self._model.ranks.call(work, message)

    def _ask(self, work: Callable[[], T], name: str, **values: Any) -> list[T]:
        return self._model.ranks.ask(work, self._model.message(name, {"state": self._number, **values}))

    def _first(self, state: Arrays, axis: int) -> Arrays:
        """Of a whole state what rank 0 holds."""
        return part_of(state, 0, self._model.ranks.count, axis)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """See `ModelState`."""
        given = {"input_ids": input_ids, "query_length": query_length}
        return self._call(partial(self._own.decode, input_ids, query_length, first), "decode", given, first=first)

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """See `ModelState`; the rows are rank 0's."""
        given = {"input_ids": input_ids, "query_length": query_length}
        return self._call(partial(self._own.step, input_ids, query_length, first), "decode", given, first=first)

    def merge(self, first: int, last: int) -> None:
        """See `ModelState`."""
        self._call(partial(self._own.merge, first, last), "merge", arguments=[first, last])

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """See `ModelState`."""
        named = {"poisoned": poisoned}
        self._call(partial(self._own.clear, first, last, **named), "clear", arguments=[first, last], named=named)

    def copy(self, source: int, target: int) -> None:
        """See `ModelState`."""
        self._call(partial(self._own.copy, source, target), "copy", arguments=[source, target])

    def rollback(self, lane: int, count: int) -> None:
        """See `ModelState`."""
        self._call(partial(self._own.rollback, lane, count), "rollback", arguments=[lane, count])

    def grown(self, lanes: int) -> RankedState:
        """See `ModelState`."""
        new = next(self._model.numbers)
        own = self._call(partial(self._own.grown, lanes), "grown", new=new, lanes=lanes)
        return RankedState(self._model, new, own)

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """See `ModelState`."""
        wanted = None if names is None else list(names)
        parts = self._ask(partial(self._own.read, lane, names), "read", lane=lane, names=wanted)
        return {name: joined([part[name] for part in parts], 0, self._slots[name]) for name in parts[0]}

    def write(self, lane: int, state: Arrays, past_length: int | None = None) -> None:
        """See `ModelState`."""
        work = partial(self._own.write, lane, self._first(state, 0), past_length)
        self._call(work, "write", state, lane=lane, past_length=past_length)

    def view(self, lane: int) -> None:
        """The state is in the memory of several processes."""

    def get_state(self) -> dict[str, NDArray[Any]]:
        """See `ModelState`."""
        parts = self._ask(self._own.get_state, "get_state")
        return {name: joined([part[name] for part in parts], 1) for name in parts[0]}

    def set_state(self, state: Arrays, past_length: NDArray[np.int64]) -> None:
        """See `ModelState`."""
        work = partial(self._own.set_state, self._first(state, 1), past_length)
        self._call(work, "set_state", {**state, "past_length": past_length})
