"""The pool of batch lanes for an engine's requests, which grows when more requests run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvexport.backends.model_state import ModelState
from kvexport.engine.lanes import Lanes
from kvexport.state.lane import Saved


class LanePool:
    """A pool of batch lanes (each with its KV cache), with as many lanes as requests ever ran at once.

    To add lanes while requests run, the pool copies all lanes into a larger state. The number of lanes at least doubles
    each time, so that copies are rare.
    """

    def __init__(self, new: Callable[[int], Lanes], most: int) -> None:
        self._new, self._most = new, most
        self._lanes: Lanes | None = None
        self._used: dict[int, bool] = {}  # for each lane that is not empty, whether its KV cache may hold NaN

    @property
    def lanes(self) -> Lanes:
        assert self._lanes is not None
        return self._lanes

    @property
    def state(self) -> ModelState:
        return cast(ModelState, self.lanes.state)

    def make(self, needed: int, *, others: bool) -> None:
        """Grow the pool to at least `needed` batch lanes. If `others` is set, the existing KV caches are copied."""
        present = 0 if self._lanes is None else self._lanes.count
        if needed > present and not others:
            self._lanes, self._used = None, {}  # frees the old state before the new one is made
            self._lanes = self._new(needed)
        elif needed > present:
            count = min(max(needed, 2 * present), self._most)
            self.lanes.grow(self.state.grown(count), count)

    def drop(self) -> None:
        self._lanes, self._used = None, {}

    def begin(self, lane: int, saved: Saved | None = None) -> None:
        if saved is not None:
            self.lanes.restore(lane, saved)
        elif lane in self._used:
            self.lanes.clear(lane, lane + 1, poisoned=self._used[lane])
        self._used[lane] = False

    def copy(self, source: int, target: int) -> None:
        if source != target:
            self.lanes.copy(source, target)
        self._used[target] = False

    def poisoned(self, lane: int) -> None:
        """Note that a batch lane's KV cache may contain NaN, so that it is overwritten before the next request."""
        self._used[lane] = True
