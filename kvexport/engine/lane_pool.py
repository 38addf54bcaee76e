"""The lanes of an engine's requests: their number, and the state that each starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvexport.backends.base import ModelState
from kvexport.engine.lanes import Lanes
from kvexport.state.lane import Saved


class LanePool:
    """A pool with as many lanes as were ever needed at once.

    If requests join others that run, lanes are added by copying the state. The pool at least doubles then, so that this
    happens seldom.

    Args:
        new: Makes empty lanes.
        most: The largest number of lanes.
    """

    def __init__(self, new: Callable[[int], Lanes], most: int) -> None:
        self._new, self._most = new, most
        self._lanes: Lanes | None = None
        self._used: dict[int, bool] = {}  # lanes that are not empty, and whether they may hold NaN

    @property
    def lanes(self) -> Lanes:
        """The lanes; `make` has to come first."""
        assert self._lanes is not None
        return self._lanes

    @property
    def state(self) -> ModelState:
        """The state tensors of the lanes."""
        return cast(ModelState, self.lanes.state)

    def make(self, needed: int, *, others: bool) -> None:
        """Make sure that `needed` lanes exist. `others` tells whether requests hold some of them already."""
        there = 0 if self._lanes is None else self._lanes.count
        if needed > there and not others:
            self._lanes, self._used = None, {}  # frees the old state before the new one is made
            self._lanes = self._new(needed)
        elif needed > there:
            count = min(max(needed, 2 * there), self._most)
            self.lanes.grow(self.state.grown(count), count)

    def drop(self) -> None:
        """Free all lanes."""
        self._lanes, self._used = None, {}

    def begin(self, lane: int, saved: Saved | None = None) -> None:
        """Prepare a lane for a request: empty, or with a saved state."""
        if saved is not None:
            self.lanes.restore(lane, saved)
        elif lane in self._used:
            self.lanes.clear(lane, lane + 1, poisoned=self._used[lane])
        self._used[lane] = False

    def copy(self, source: int, target: int) -> None:
        """Prepare a lane for a request with the state of another lane."""
        if source != target:
            self.lanes.copy(source, target)
        self._used[target] = False

    def poisoned(self, lane: int) -> None:
        """Note that a lane may contain NaN."""
        self._used[lane] = True
