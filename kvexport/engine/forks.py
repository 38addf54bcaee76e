"""Several answers to one prompt: the prompt is read once, and each answer starts from a copy of its KV cache."""

from __future__ import annotations

from dataclasses import replace

from kvexport.backends.rows import HostRows, Rows
from kvexport.engine.lane_pool import LanePool
from kvexport.engine.request import FINISHED, PromptEnd, Request
from kvexport.engine.scheduler import Scheduler


class Forks:
    """The forks of an engine's requests: further answers to a prompt that is read only once.

    A fork copies the prompt's lane if that lane has not changed since the prompt was read. Before the lane changes, its
    state is saved for later forks.
    """

    def __init__(self, scheduler: Scheduler, pool: LanePool) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._parents: list[Request] = []  # requests whose `prompt_end` is set

    def __len__(self) -> int:
        return len(self._parents)

    def read(self, request: Request, rows: Rows, index: int) -> None:
        if self._scheduler.forks(request):
            request.prompt_end = PromptEnd(rows.row(index).copy(), request.lane)
            self._parents.append(request)

    def keep(self) -> None:
        """Save, before a step, the lanes that the step will change and that waiting forks start from."""
        for parent in self._parents:
            end = parent.prompt_end
            assert end is not None
            if end.saved is None and (parent.state is FINISHED or self._scheduler.forks(parent)):
                parent.prompt_end = replace(end, saved=self._pool.lanes.save(end.lane))

    def begin(self, request: Request, parent: Request) -> HostRows:
        """Copy the state after the prompt into a fork's lane, and return the logits of the fork's first token."""
        end = parent.prompt_end
        assert end is not None
        if end.saved is None:
            self._pool.copy(parent.lane, request.lane)
        else:
            self._pool.begin(request.lane, end.saved)
        request.fork_of = None
        return HostRows(end.row[None])

    def forget(self) -> None:
        """Drop, after a step, the stored prompt states that no waiting fork needs."""
        for parent in self._parents:
            if not self._scheduler.forks(parent):
                parent.prompt_end = None
        self._parents = [parent for parent in self._parents if parent.prompt_end is not None]
