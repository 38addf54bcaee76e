"""Which requests hold which lanes, whose prompts are read next, and who decodes. Nothing here computes.

- A request gets the lowest free lane, in the order of arrival, and keeps it until it finishes.
- Every step reads one chunk of a prompt, of the lane whose last turn is the longest ago, so that no prompt waits for
  the end of another. Neighbouring lanes that are prefilled as well come along where that is cheaper than a call of
  their own.
- Every step decodes all lanes whose prompts are read; those of one call begin together (see `Request.call`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvexport.runtime.request import FINISHED, PREFILLING, Request

# What a call costs beyond its rows, in rows: it reads every weight once.
CALL_ROWS = 32


class Schedule(NamedTuple):
    """One step. admitted: requests that got their lane for it. prefill: of neighbouring lanes, each with its next
    chunk. decode: in the order of their lanes."""

    admitted: Sequence[Request] = ()
    prefill: Sequence[Request] = ()
    decode: Sequence[Request] = ()


class Scheduler:
    """Of one engine. lanes: how many requests run at once, at most. chunk: tokens of a prompt that one call reads, at
    most."""

    def __init__(self, lanes: int, chunk: int) -> None:
        self.chunk = chunk
        self.lanes: list[Request | None] = [None] * lanes
        self.waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()  # in the order of their turns
        self._decoding: list[Request] = []  # in the order of their lanes

    @property
    def busy(self) -> bool:
        """Whether any request waits or holds a lane."""
        return bool(self.waiting or self._prefilling or self._decoding)

    def running(self) -> list[Request]:
        """The requests that hold a lane, in the order of the lanes."""
        return [request for request in self.lanes if request is not None]

    def add(self, request: Request) -> None:
        """Let it wait for a lane."""
        self.waiting.append(request)

    def next(self) -> Schedule:
        """What the next step does. `update` follows it."""
        if not self.waiting and not self._prefilling:
            return Schedule((), (), self._decoding)
        admitted = self._admit()
        unread = {request.call for request in self._prefilling} - {None}
        decode = [request for request in self._decoding if request.call not in unread]
        return Schedule(admitted, self._chunks(), decode)

    def update(self, step: Schedule) -> list[Request]:
        """Take note of the state that each of a step's requests has now; returns those that finished, whose lanes are
        free again."""
        for request in step.prefill:
            if request.state is not FINISHED:
                self._prefilling.remove(request)
                if request.state is PREFILLING:
                    self._prefilling.append(request)
                else:
                    self._decoding = sorted([*self._decoding, request], key=lambda r: r.lane)
        finished = {request.id: request for requests in step for request in requests if request.state is FINISHED}
        for request in finished.values():
            self.remove(request)
        return list(finished.values())

    def remove(self, request: Request) -> None:
        """Take a request out between two steps, wherever it is."""
        if request.lane >= 0:
            self.lanes[request.lane] = None
        self._decoding = [other for other in self._decoding if other is not request]
        for queue in (self.waiting, self._prefilling):
            if request in queue:
                queue.remove(request)

    def _admit(self) -> list[Request]:
        admitted = []
        for lane, holder in enumerate(self.lanes):
            if holder is None and self.waiting:
                request = self.lanes[lane] = self.waiting.popleft()
                request.begin(lane)
                admitted.append(request)
        self._prefilling.extend(admitted)
        return admitted

    def _chunks(self) -> list[Request]:
        """The request whose turn it is, and neighbours whose chunks cost less in the same call than in their own: all
        are padded to the longest of them."""
        if not self._prefilling:
            return []
        chosen = [self._prefilling[0]]
        for after in (True, False):
            while (other := self._neighbour(chosen, after)) is not None:
                longest, more = max(map(self.count, chosen)), self.count(other)
                padded = (len(chosen) + 1) * max(longest, more)
                if padded > len(chosen) * longest + more + CALL_ROWS:
                    break
                chosen = [*chosen, other] if after else [other, *chosen]
        return chosen

    def _neighbour(self, chosen: list[Request], after: bool) -> Request | None:
        lane = chosen[-1].lane + 1 if after else chosen[0].lane - 1
        request = self.lanes[lane] if 0 <= lane < len(self.lanes) else None
        return request if request is not None and request.state is PREFILLING else None

    def count(self, request: Request) -> int:
        """Tokens of its next chunk."""
        return min(self.chunk, request.unread)
