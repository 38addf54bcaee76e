"""The scheduler: it assigns batch lanes to requests, and picks the next prompt chunks and the lanes that decode.

- Waiting requests get the lowest free lanes, in the order of priority and then of arrival. A request keeps its lane
  until it finishes, or moves to a lower free lane. Requests move because a decode call covers all lanes up to the last
  lane that decodes.
- Every step reads one prompt chunk. Steps alternate between the prompt with the fewest unread chunks and the prompt
  that arrived first. So equal prompts finish in the order of arrival, a short prompt waits for at most one chunk of a
  longer one, and the first prompt gets at least half of the prefill calls.
- Prompt chunks of neighbouring lanes join the same call if that is cheaper than calls of their own, up to `rows` tokens
  in one call, padding included. Decoding lanes and new prompts wait for the call.
- Every step decodes all lanes whose prompts have been read. Requests that were submitted together (`Request.bundle`)
  begin to decode together.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvexport.engine.request import DECODING, FINISHED, PREFILLING, WAITING, Request

# The fixed cost of a model call, which reads every weight once, as a number of rows (one token of one lane).
CALL_ROWS = 32
# A request that may generate fewer further tokens than this is not moved to a lower lane.
MOVED_TOKENS = 8


class Schedule(NamedTuple):
    """The work of one engine step: which requests get batch lanes, read a prompt chunk, decode, or change lanes."""

    admitted: Sequence[Request] = ()  # requests that got their lane for this step
    prefill: Sequence[Request] = ()  # requests in neighbouring lanes that read their next chunk
    decode: Sequence[Request] = ()  # requests that decode, in the order of their lanes
    moved: Sequence[Request] = ()  # at most one request that moves to another lane
    source: int = -1  # lane that the moved request leaves; -1 for none
    expired: Sequence[Request] = ()


class Scheduler:
    def __init__(
        self, lanes: int, chunk: int, follows: Callable[[Request, Sequence[Request]], bool] = lambda *_: False
    ) -> None:
        self._follows = follows
        self.chunk = chunk
        self.rows: int | None = None
        self.lanes: list[Request | None] = [None] * lanes
        self.waiting: list[Request] = []  # in the order in which they get their lanes
        self._prefilling: list[Request] = []
        self._first_next = False  # whether the prompt that arrived first gets the next call
        self._decoding: list[Request] = []  # in the order of their lanes
        self._joining: list[Request] = []  # requests that got a lane in this step and decode from the next step on

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._prefilling or self._decoding)

    @property
    def decodes_only(self) -> bool:
        """Whether no request waits or reads its prompt, so that steps decode for the same requests until one ends."""
        return not (self.waiting or self._prefilling)

    def running(self) -> list[Request]:
        return [request for request in self.lanes if request is not None]

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda other: (other.priority, other.id))

    def expired(self, now: float) -> list[Request]:
        """Return the requests that have no batch lane and whose deadline has passed at time `now`."""
        return [x for x in self.waiting if x.deadline is not None and x.deadline <= now]

    def next(self) -> Schedule:
        """Plan and return the work of the next engine step. Call `update` after the step."""
        if not self.waiting and not self._prefilling:
            moved = self._move()
            return Schedule((), (), self._decoding, *moved)
        admitted, moved = self._admit(), self._move()
        unread = {request.bundle for request in self._prefilling} - {None}
        decode = [request for request in self._decoding if request.bundle not in unread]
        return Schedule(admitted, self._chunks(), decode, *moved)

    def _move(self) -> tuple[Sequence[Request], int]:
        """Move the request in the last decoding lane (row of the batch) to the lowest free lane, if one is lower.

        At most one request moves in a step.
        """
        if not self._decoding or None not in self.lanes:
            return (), -1
        last, free = self._decoding[-1], self.lanes.index(None)
        left = last.sampler.settings.max_new_tokens - len(last.sampler.generated)
        if free > last.lane or left < MOVED_TOKENS:
            return (), -1
        source, last.lane = last.lane, free
        self.lanes[source], self.lanes[free] = None, last
        self._decoding = sorted(self._decoding, key=lambda r: r.lane)
        return (last,), source

    def update(self, step: Schedule) -> list[Request]:
        self._prefilling = [request for request in self._prefilling if request.state is PREFILLING]
        joining = [r for r in (*step.prefill, *self._joining) if r.state is DECODING]
        if joining:
            self._decoding = sorted([*self._decoding, *joining], key=lambda r: r.lane)
            self._joining = []
        worked = (*step.admitted, *step.moved, *step.prefill, *step.decode)
        finished = {request.id: request for request in worked if request.state is FINISHED}
        for request in finished.values():
            self.remove(request)
        return list(finished.values())

    def remove(self, request: Request) -> None:
        """Remove a request from the waiting queue and from its batch lane, between two steps."""
        if request.lane >= 0:
            self.lanes[request.lane] = None
        self._decoding = [other for other in self._decoding if other is not request]
        for queue in (self.waiting, self._prefilling):
            if request in queue:
                queue.remove(request)

    def forks(self, request: Request) -> list[Request]:
        return [other for other in self.waiting if other.fork_of is request]

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        free = [lane for lane, holder in enumerate(self.lanes) if holder is None]
        for request in list(self.waiting):
            if not free:
                break
            if not self._is_ready(request) or self._follows(request, [*self._prefilling, *admitted]):
                continue
            self.waiting.remove(request)
            lane = free.pop(0)
            self.lanes[lane] = request
            request.begin(lane)
            admitted.append(request)
        self._prefilling.extend(request for request in admitted if request.state is PREFILLING)
        self._joining = [request for request in admitted if request.state is DECODING]
        return admitted

    def _is_ready(self, request: Request) -> bool:
        """Return whether a waiting request can get a lane (row of the batch) now.

        A fork (another answer to a prompt) waits until the prompt has been read. If the request that should read the
        prompt ended early, the fork reads the prompt.
        """
        parent = request.fork_of
        if parent is None or parent.prompt_end is not None:
            return True
        if parent.state in (WAITING, PREFILLING) and parent.id:
            return False
        for other in self.forks(parent):
            other.fork_of = request
        request.fork_of = None
        return True

    def _chunks(self) -> list[Request]:
        """Return the requests whose next prompt chunks one prefill call reads together.

        All chunks of a call are padded to the longest chunk, so requests in neighbouring lanes (rows of the batch) join
        a call only if the padding costs less than a call of their own.
        """
        if not self._prefilling:
            return []
        first = min(self._prefilling, key=lambda request: (request.priority, request.id))
        shortest = min(
            self._prefilling, key=lambda request: (-(-request.unread // self.chunk), request.priority, request.id)
        )
        requests = [first if self._first_next else shortest]
        self._first_next = first is not shortest and not self._first_next
        most = math.inf if self.rows is None else max(self.rows, self.chunk)
        for after in (True, False):
            while (other := self._neighbour(requests, after)) is not None:
                longest, more = max(map(self.count, requests)), self.count(other)
                padded = (len(requests) + 1) * max(longest, more)
                if padded > len(requests) * longest + more + CALL_ROWS or padded > most:
                    break
                requests = [*requests, other] if after else [other, *requests]
        return requests

    def _neighbour(self, requests: list[Request], after: bool) -> Request | None:
        lane = requests[-1].lane + 1 if after else requests[0].lane - 1
        request = self.lanes[lane] if 0 <= lane < len(self.lanes) else None
        return request if request is not None and request.state is PREFILLING else None

    def count(self, request: Request) -> int:
        return min(self.chunk, request.unread)
