"""Which requests hold which lanes, whose prompts are read next, and who decodes. Nothing here computes.

- A request gets the lowest free lane, in the order of priority, then of arrival. It keeps it until it finishes, or
  until a lower one stays free: lanes that decode are a prefix, since each up to the last of them costs a row.
- Every step reads one chunk of a prompt. Calls alternate between the prompt with the fewest unread chunks and the one
  that arrived first. So equal prompts finish in the order of arrival, a short prompt waits for at most one chunk of a
  longer one, and the first prompt gets at least half of the calls.
- Neighbouring lanes that are prefilled as well come along where that is cheaper than a call of their own, up to `rows`
  beyond one chunk: those that decode wait for the call, and so does a prompt that arrives meanwhile.
- Where the engine is told to, a request of a better priority takes the lane of the worst that has one, which waits as
  if it had just come and goes on where it was.
- Every step decodes all lanes whose prompts are read; those of one call begin together (see `Request.bundle`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvexport.engine.request import DECODING, FINISHED, PREFILLING, WAITING, Request

# What a call costs beyond its rows, in rows: it reads every weight once.
CALL_ROWS = 32
# Fewer tokens than these are not worth moving a lane for.
MOVED_TOKENS = 8


class Schedule(NamedTuple):
    """One step. admitted: requests that got their lane for it. prefill: of neighbouring lanes, each with its next
    chunk. decode: in the order of their lanes. moved: at most one request, whose lane was `source`."""

    admitted: Sequence[Request] = ()
    prefill: Sequence[Request] = ()
    decode: Sequence[Request] = ()
    moved: Sequence[Request] = ()
    source: int = -1
    expired: Sequence[Request] = ()


class Scheduler:
    """Of one engine. lanes: how many requests run at once, at most. chunk: tokens of a prompt that one call reads, at
    most. follows: whether a request had better wait for what one of those that prefill is reading. rows: of a call of
    prompts, at most, where that is more than one chunk has; None: any number."""

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
        self._joining: list[Request] = []  # they hold a lane for this step, and decode from the next one on

    @property
    def busy(self) -> bool:
        """Whether any request waits or holds a lane."""
        return bool(self.waiting or self._prefilling or self._decoding)

    def running(self) -> list[Request]:
        """The requests that hold a lane, in the order of the lanes."""
        return [request for request in self.lanes if request is not None]

    def add(self, request: Request) -> None:
        """Let it wait for a lane."""
        bisect.insort(self.waiting, request, key=lambda other: (other.priority, other.id))

    @property
    def excess(self) -> int:
        """How many requests wait beyond those that the free lanes are for; below 0 where lanes stay free."""
        return len(self.waiting) - self.lanes.count(None)

    def expired(self, now: float) -> list[Request]:
        """Those that never had a lane and whose deadline has passed."""
        return [
            request
            for request in self.waiting
            if request.deadline is not None and request.deadline <= now and request.parked is None
        ]

    def displaced(self) -> Request | None:
        """The last of those that hold a lane, in the order of those that wait, where there is no free lane and one of a
        better priority waits for it. None of those from which forks are about to begin."""
        if None in self.lanes or not self.waiting:
            return None
        first = next((request for request in self.waiting if self._may_begin(request, [*self._prefilling])), None)
        held = [request for request in self.running() if request.prompt_end is None]
        last = max(held, key=lambda request: (request.priority, request.id), default=None)
        return last if first is not None and last is not None and first.priority < last.priority else None

    def next(self) -> Schedule:
        """What the next step does. `update` follows it."""
        if not self.waiting and not self._prefilling:
            moved = self._move()
            return Schedule((), (), self._decoding, *moved)
        admitted, moved = self._admit(), self._move()
        unread = {request.bundle for request in self._prefilling} - {None}
        decode = [request for request in self._decoding if request.bundle not in unread]
        return Schedule(admitted, self._chunks(), decode, *moved)

    def _move(self) -> tuple[Sequence[Request], int]:
        """Give the last lane that decodes the lowest free one, where that is lower: one lane a step."""
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
        """Take note of the state that each of a step's requests has now; returns those that finished, whose lanes are
        free again."""
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
        """Take a request out between two steps, wherever it is."""
        if request.lane >= 0:
            self.lanes[request.lane] = None
        self._decoding = [other for other in self._decoding if other is not request]
        for queue in (self.waiting, self._prefilling):
            if request in queue:
                queue.remove(request)

    def forks(self, request: Request) -> list[Request]:
        """Those of a request that wait."""
        return [other for other in self.waiting if other.fork_of is request]

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        free = [lane for lane, holder in enumerate(self.lanes) if holder is None]
        for request in list(self.waiting):
            if not free:
                break
            if not self._may_begin(request, [*self._prefilling, *admitted]):
                continue
            self.waiting.remove(request)
            lane = free.pop(0)
            self.lanes[lane] = request
            request.begin(lane)
            admitted.append(request)
        self._prefilling.extend(request for request in admitted if request.state is PREFILLING)
        self._joining = [request for request in admitted if request.state is DECODING]
        return admitted

    def _may_begin(self, request: Request, prefilling: Sequence[Request]) -> bool:
        return self._is_ready(request) and not self._follows(request, prefilling)

    def _is_ready(self, request: Request) -> bool:
        """Whether a request can begin: a fork waits until the prompt is read, and reads it itself where the request
        that was to read it did not."""
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
        """The next request, and neighbours whose chunks cost less in the same call than in their own: all are padded to
        the longest of them."""
        if not self._prefilling:
            return []
        first = min(self._prefilling, key=lambda request: (request.priority, request.id))
        shortest = min(
            self._prefilling, key=lambda request: (-(-request.unread // self.chunk), request.priority, request.id)
        )
        chosen = [first if self._first_next else shortest]
        self._first_next = first is not shortest and not self._first_next
        most = math.inf if self.rows is None else max(self.rows, self.chunk)
        for after in (True, False):
            while (other := self._neighbour(chosen, after)) is not None:
                longest, more = max(map(self.count, chosen)), self.count(other)
                padded = (len(chosen) + 1) * max(longest, more)
                if padded > len(chosen) * longest + more + CALL_ROWS or padded > most:
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
