"""Several answers to one prompt: the prompt is read once, and each answer starts from a copy of its KV cache."""

from __future__ import annotations

from dataclasses import replace

from kvexport.backends.rows import HostRows, Rows
from kvexport.engine.lane_pool import LanePool
from kvexport.engine.request import FINISHED, PromptEnd, Request
from kvexport.engine.scheduler import Scheduler


class Forks:
    """The forks of an engine's requests: further answers to a prompt that is read only once.

    A fork begins with a copy of the KV cache of the request that read the prompt. Before that cache changes, its state
    is saved for the forks that still wait.
    """

    def __init__(self, scheduler: Scheduler, pool: LanePool) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._parents: list[Request] = []  # requests whose `prompt_end` is set

    def read(self, request: Request, rows: Rows, index: int) -> None:
        if self._scheduler.forks(request):
            request.prompt_end = PromptEnd(rows.row(index).copy(), request.lane)
            self._parents.append(request)

    def keep(self) -> None:
        """Save the KV caches that waiting forks (further answers) start from, if the next step changes them."""
        for parent in self._parents:
            end = parent.prompt_end
            assert end is not None
            if end.saved is None and (parent.state is FINISHED or self._scheduler.forks(parent)):
                parent.prompt_end = replace(end, saved=self._pool.lanes.save(end.lane))

    def begin(self, request: Request, parent: Request) -> HostRows:
        """Copy the KV cache after the prompt of `parent` to the fork, and return the logits after the prompt."""
        end = parent.prompt_end
        assert end is not None
        if end.saved is None:
            self._pool.copy(parent.lane, request.lane)
        else:
            self._pool.begin(request.lane, end.saved)
        request.fork_of = None
        return HostRows(end.row[None])

    def forget(self) -> None:
        """Drop the stored prompt ends (logits and KV caches) that no waiting fork needs any more."""
        for parent in self._parents:
            if not self._scheduler.forks(parent):
                parent.prompt_end = None
        self._parents = [parent for parent in self._parents if parent.prompt_end is not None]
