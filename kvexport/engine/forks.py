"""Several answers to one prompt: it is read once, and the lane as it then is becomes that of each."""

from __future__ import annotations

from dataclasses import replace

from kvexport.backends.rows import HostRows, Rows
from kvexport.engine.lane_pool import LanePool
from kvexport.engine.request import FINISHED, PromptEnd, Request
from kvexport.engine.scheduler import Scheduler


class Forks:
    """Those of one engine's requests. A fork that gets a lane while the prompt's lane is still as the prompt left it
    copies that; for others it is saved."""

    def __init__(self, scheduler: Scheduler, pool: LanePool) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._parents: list[Request] = []  # requests with a `prompt_end`

    def __len__(self) -> int:
        """How many prompts are kept for forks that wait."""
        return len(self._parents)

    def read(self, request: Request, rows: Rows, index: int) -> None:
        """A prompt was read; the row of logits is where its forks' answers begin."""
        if self._scheduler.forks(request):
            request.prompt_end = PromptEnd(rows.row(index).copy(), request.lane)
            self._parents.append(request)

    def keep(self) -> None:
        """Before a step: save lanes that do not stay as their prompt left them, for forks that still wait."""
        for parent in self._parents:
            end = parent.prompt_end
            assert end is not None
            if end.saved is None and (parent.state is FINISHED or self._scheduler.forks(parent)):
                parent.prompt_end = replace(end, saved=self._pool.lanes.save(end.lane))

    def begin(self, request: Request, parent: Request) -> HostRows:
        """Make a fork's lane what its prompt left; the row of logits where its answer begins."""
        end = parent.prompt_end
        assert end is not None
        if end.saved is None:
            self._pool.copy(parent.lane, request.lane)
        else:
            self._pool.begin(request.lane, end.saved)
        request.fork_of = None
        return HostRows(end.row[None])

    def forget(self) -> None:
        """After a step: let go of prompts that no fork waits for."""
        for parent in self._parents:
            if not self._scheduler.forks(parent):
                parent.prompt_end = None
        self._parents = [parent for parent in self._parents if parent.prompt_end is not None]
