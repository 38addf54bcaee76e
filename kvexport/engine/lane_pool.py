"""The lanes that an engine's requests hold: how many there are, and what each begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvexport.backends.base import ModelState
from kvexport.engine.lanes import Lanes
from kvexport.state.lane import Saved


class LanePool:
    """As many lanes as ever were needed at once. When requests join those that run, lanes are added by copying (at
    least as many as there are, so that it happens seldom), up to `most`. new: makes empty lanes."""

    def __init__(self, new: Callable[[int], Lanes], most: int) -> None:
        self._new, self._most = new, most
        self._lanes: Lanes | None = None
        self._used: dict[int, bool] = {}  # lanes that are not empty, and whether they may hold NaN

    @property
    def lanes(self) -> Lanes:
        """The lanes, once there are some."""
        assert self._lanes is not None
        return self._lanes

    @property
    def state(self) -> ModelState:
        """Theirs."""
        return cast(ModelState, self.lanes.state)

    def make(self, needed: int, *, others: bool) -> None:
        """Make sure that so many lanes are there. others: some of them are held already."""
        there = 0 if self._lanes is None else self._lanes.count
        if needed > there and not others:
            self._lanes, self._used = None, {}  # the old state is freed before the new one is made
            self._lanes = self._new(needed)
        elif needed > there:
            count = min(max(needed, 2 * there), self._most)
            self.lanes.grow(self.state.grown(count), count)

    def drop(self) -> None:
        """Free all lanes."""
        self._lanes, self._used = None, {}

    def begin(self, lane: int, saved: Saved | None = None) -> None:
        """Give a lane: empty, or as another was when it was saved."""
        if saved is not None:
            self.lanes.restore(lane, saved)
        elif lane in self._used:
            self.lanes.clear(lane, lane + 1, poisoned=self._used[lane])
        self._used[lane] = False

    def copy(self, source: int, target: int) -> None:
        """Give a lane as another is now."""
        if source != target:
            self.lanes.copy(source, target)
        self._used[target] = False

    def poisoned(self, lane: int) -> None:
        """Remember that a lane may hold NaN."""
        self._used[lane] = True
