"""A model and its KV caches on several tensor-parallel ranks, with the interface of a model in one process.

Every call of the state runs on all ranks. A cache is read and written as a whole (`kvexport.ranks.heads`). Logits are
those of rank 0, because all ranks compute the same.
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
from kvexport.backends.lane_state import slot_places as slot_axes
from kvexport.backends.model_state import Memory, ModelState
from kvexport.backends.rows import Rows
from kvexport.cache import CachePlan
from kvexport.ranks.channel import Message
from kvexport.ranks.heads import Arrays, joined, rank_heads
from kvexport.ranks.processes import Ranks

T = TypeVar("T")


class RankedModel:
    """A loaded model that runs on several tensor-parallel ranks (see `LoadedModel`)."""

    def __init__(self, ranks: Ranks, manifest: Manifest) -> None:
        self.ranks, self.plan = ranks, manifest.cache
        self.all_logits: bool = ranks.model.all_logits
        self.dropped: deque[int] = deque()  # the numbers of states that are no longer used
        self.numbers = itertools.count()

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> RankedState:
        """Create empty KV caches for `lanes` sequences on all ranks.

        Args:
            plan: The cache plan of the artifact.
            lanes: The number of sequences.
            memory: Ignored, because recipes with the state in a file are refused with several ranks.
        """
        assert plan == self.plan, "ranks support only the cache plan of the artifact"
        number = next(self.numbers)
        local = self.ranks.call(
            partial(self.ranks.model.new_state, self.ranks.manifest.cache, lanes),
            self.message("new_state", {"state": number, "lanes": lanes}),
        )
        return RankedState(self, number, local)

    def message(self, name: str, values: Mapping[str, Any], arrays: Arrays | None = None) -> Message:
        """Return a message to all tensor-parallel ranks: a call to execute, and KV-cache states to release."""
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        return Message(name, {**values, "dropped": dropped}, arrays or {})


class RankedState(ModelState):
    """KV caches of a batch, divided among tensor-parallel ranks by KV head (see `ModelState`)."""

    def __init__(self, model: RankedModel, number: int, local: ModelState) -> None:
        self._model, self._number, self._local = model, number, local
        self._slots = slot_axes(model.plan)
        self.top_logits = local.top_logits
        weakref.finalize(self, model.dropped.append, number).atexit = False

    def _call(self, work: Callable[[], T], name: str, arrays: Arrays | None = None, **values: Any) -> T:
        message = self._model.message(name, {"state": self._number, **values}, arrays)
        return self._model.ranks.call(work, message)

    def _ask(self, work: Callable[[], T], name: str, **values: Any) -> list[T]:
        return self._model.ranks.ask(work, self._model.message(name, {"state": self._number, **values}))

    def _local_heads(self, state: Arrays, axis: int) -> Arrays:
        """Return the KV heads of rank 0 from tensors over all heads."""
        return rank_heads(state, 0, self._model.ranks.count, axis)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append tokens to the sequences of batch lanes on all ranks, and return logits; see `LaneState.decode`."""
        arrays = {"input_ids": input_ids, "query_length": query_length}
        return self._call(partial(self._local.decode, input_ids, query_length, first), "decode", arrays, first=first)

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """Append one token to each batch lane on all ranks, and return its logits; see `ModelState.step`."""
        arrays = {"input_ids": input_ids, "query_length": query_length}
        return self._call(partial(self._local.step, input_ids, query_length, first), "decode", arrays, first=first)

    def merge(self, first: int, last: int) -> None:
        """Compress the KV cache of each lane first <= lane < last to its budget, on all ranks."""
        self._call(partial(self._local.merge, first, last), "merge", arguments=[first, last])

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Empty the KV caches of lanes first <= lane < last on all ranks; see `LaneState.clear`."""
        keywords = {"poisoned": poisoned}
        self._call(
            partial(self._local.clear, first, last, **keywords),
            "clear",
            arguments=[first, last],
            keywords=keywords,
        )

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one batch lane over that of another on all ranks; see `ModelState.copy`."""
        self._call(partial(self._local.copy, source, target), "copy", arguments=[source, target])

    def rollback(self, lane: int, count: int) -> None:
        """Remove the last `count` tokens from one lane's KV cache on all ranks; see `ModelState.rollback`."""
        self._call(partial(self._local.rollback, lane, count), "rollback", arguments=[lane, count])

    def grown(self, lanes: int) -> RankedState:
        """Return a state with more batch lanes, the first of which are copies of these; see `ModelState.grown`."""
        new = next(self._model.numbers)
        local = self._call(partial(self._local.grown, lanes), "grown", new=new, lanes=lanes)
        return RankedState(self._model, new, local)

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of one lane's state tensors, joined over the KV heads of all ranks; see `ModelState.read`."""
        listed = None if names is None else list(names)
        tensors = self._ask(partial(self._local.read, lane, names), "read", lane=lane, names=listed)
        return {name: joined([rank[name] for rank in tensors], 0, self._slots[name]) for name in tensors[0]}

    def write(self, lane: int, state: Arrays, past_length: int | None = None) -> None:
        """Overwrite one lane's state tensors on all ranks; see `ModelState.write`."""
        work = partial(self._local.write, lane, self._local_heads(state, 0), past_length)
        self._call(work, "write", state, lane=lane, past_length=past_length)

    def view(self, lane: int) -> None:
        """Return None: the KV caches are divided over the memory of several processes, so there is no view of them."""

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all state tensors, joined over the KV heads of all ranks."""
        tensors = self._ask(self._local.get_state, "get_state")
        return {name: joined([rank[name] for rank in tensors], 1) for name in tensors[0]}

    def set_state(self, state: Arrays, past_length: NDArray[np.int64]) -> None:
        """Overwrite the state tensors of the first n batch lanes on all ranks; see `ModelState.set_state`."""
        work = partial(self._local.set_state, self._local_heads(state, 1), past_length)
        self._call(work, "set_state", {**state, "past_length": past_length})
