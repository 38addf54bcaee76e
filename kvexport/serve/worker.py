"""The thread that owns an engine. Nothing else touches the engine: the event loop hands it calls, which it makes
between two steps, and it hands back what the steps made, one message a step."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvexport.engine.engine import Engine
from kvexport.engine.request import FINISHED, FinishReason, Request
from kvexport.language.token import Token
from kvexport.serve.errors import ApiError, overloaded
from kvexport.serve.metrics import Metrics
from kvexport.serve.tracing import Times, Tracing

T = TypeVar("T")
log = logging.getLogger("kvexport.serve")


class Update(NamedTuple):
    """What a step made of one request of a job, `choice` counting from 0. error: why it ended, where finish_reason is
    "error"."""

    choice: int
    tokens: Sequence[Token]
    finish_reason: FinishReason | None = None
    error: Exception | None = None


class Job:
    """The requests of one client, and the updates that it has not taken yet. Of the event loop, but for `requests`,
    which are the worker's until they finish.

    streams: False where nothing is wanted before the end, and updates bring no tokens. buffer: tokens that may wait to
    be taken; with one more the job is given up.
    """

    def __init__(self, requests: Sequence[Request], *, streams: bool, buffer: int = 0) -> None:
        self.requests = requests
        self.streams = streams
        self.open = len(requests)  # requests that have not finished
        self.timer: asyncio.TimerHandle | None = None
        self.parent: Any = None  # of its spans
        self._buffer, self._behind = buffer, 0
        self._updates: deque[Update] = deque()
        self._ready = asyncio.Event()
        self._error: ApiError | None = None

    def put(self, update: Update) -> bool:
        """Give it an update; False where its reader is too far behind."""
        self._updates.append(update)
        self._behind += len(update.tokens)
        self.open -= update.finish_reason is not None
        self._ready.set()
        return self._behind <= self._buffer or not self.streams

    def fail(self, error: ApiError) -> None:
        """End it for its reader."""
        self._error = self._error or error
        self._ready.set()

    async def updates(self, every: float) -> AsyncIterator[Update | None]:
        """Until all requests have finished; None about every so many seconds, where nothing else is there. Raises what
        `fail` gave."""
        loop, quiet = asyncio.get_running_loop(), False
        timer: asyncio.TimerHandle

        def wind() -> None:
            nonlocal timer
            timer = loop.call_later(every, ring)

        def ring() -> None:
            nonlocal quiet
            quiet = True
            self._ready.set()
            wind()

        wind()
        try:
            while self._updates or self.open or self._error:
                if self._error:
                    raise self._error
                if self._updates:
                    update = self._updates.popleft()
                    self._behind -= len(update.tokens)
                    yield update
                elif quiet:
                    quiet = False
                    yield None
                else:
                    self._ready.clear()
                    await self._ready.wait()
        finally:
            timer.cancel()


@dataclass
class _Entry:
    """A request that has not finished. sent: tokens that its job has been given. Times of time.perf_counter(): added,
    first (of its first token), last (of its last one)."""

    job: Job
    choice: int
    added: float
    sent: int = 0
    first: float = 0.0
    last: float = 0.0


class Worker:
    """Drives `engine`. room: requests that may run and wait together. tracing: hears of every request that finished."""

    def __init__(self, engine: Engine, metrics: Metrics, room: int, tracing: Tracing | None = None) -> None:
        self.engine = engine
        self.metrics = metrics
        self.tracing = tracing
        self.room = room
        self.pending = 0  # requests that have not finished, or are on their way here
        self.generated = 0  # tokens, of all requests
        self.draining = False
        self.failed = False  # its thread has ended by itself: nothing will be answered any more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any] | None]] = queue.SimpleQueue()
        self._entries: dict[int, _Entry] = {}
        self._jobs: set[Job] = set()
        self._ending = False

    # Of the event loop's thread.

    def start(self) -> None:
        """Begin; in the event loop that hears of it."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="kvexport-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread is not None and self._thread.is_alive() and not (self.draining or self.failed)

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """What `function` returns in the engine's thread, between two steps. Raises ApiError where that has ended."""
        assert self._loop is not None
        if self.failed:
            raise _failed()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((function, future))
        return future

    async def submit(self, job: Job) -> None:
        """Let the requests of a job wait for lanes. `cancel` must follow, whatever happens. Raises ApiError where there
        is no room, UsageError for a request that cannot be answered."""
        if self.failed:
            raise _failed()
        if self.draining:
            raise overloaded("the server is shutting down", 5)
        count = len(job.requests)
        if self.pending + count > self.room:
            waiting = max(0, self.pending - self.engine.max_batch)
            raise overloaded(f"the queue is full: {waiting} requests wait, and no more than that may")
        self.pending += count
        self._jobs.add(job)
        added = self.call(lambda: self._add(job))
        added.add_done_callback(lambda future: self._rejected(job) if future.exception() else None)
        await asyncio.shield(added)  # a client that is gone by now does not keep `_rejected` from being called

    def _rejected(self, job: Job) -> None:
        self.pending -= len(job.requests)
        self._jobs.discard(job)

    def cancel(self, job: Job) -> None:
        """End what still runs of a job; its lanes are free at the next step."""
        if job.open and job in self._jobs:
            self._calls.put((lambda: self._cancel(job), None))

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and wait for those that are here; after so many seconds they are ended."""
        self.draining = True
        end = time.monotonic() + seconds
        while self._jobs and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for job in list(self._jobs):
            job.fail(overloaded("the server is shutting down", 5))
            self.cancel(job)

    async def close(self) -> None:
        """End the thread. What still runs is cancelled."""
        self.draining = self._ending = True
        self._calls.put((lambda: None, None))
        if self._thread is not None:
            while self._thread.is_alive():
                await asyncio.sleep(0.005)

    def _fail(self) -> None:
        self.failed = True
        for job in self._jobs:
            job.fail(_failed())
        while not self._calls.empty():
            _, future = self._calls.get()
            if future is not None:
                _settle(future, None, _failed())

    def _post(self, updates: Sequence[tuple[Job, Update]]) -> None:
        for job, update in updates:
            self.pending -= update.finish_reason is not None
            if not job.put(update):
                job.fail(ApiError(499, "the reader fell too far behind"))
                self.cancel(job)
            if not job.open:
                self._jobs.discard(job)

    # Of the engine's thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._make_calls()
                if self.engine.busy and not self._ending:
                    self._step()
        except BaseException:
            log.critical("the engine's thread has failed: the server answers nothing any more", exc_info=True)
            self._to_loop(self._fail)
            return
        for job in {entry.job for entry in self._entries.values()}:
            self._cancel(job)
        self._make_calls(wait=False)

    def _make_calls(self, wait: bool = True) -> None:
        """All that are there; where the engine has nothing to do, the next one too."""
        with suppress(queue.Empty):
            while True:
                function, future = self._calls.get(block=wait and not self.engine.busy and not self._ending)
                result, error = None, None
                try:
                    result = function()
                except Exception as caught:
                    error = caught
                if future is not None:
                    self._to_loop(_settle, future, result, error)
                elif error is not None:
                    log.error("a call in the engine's thread failed", exc_info=error)

    def _step(self) -> None:
        try:
            advanced = self.engine.step()
        except Exception as error:
            # The requests that took part have the error; the others go on.
            log.error("a step of the engine failed", exc_info=error)
            advanced = [r for e in self._entries.values() if (r := e.job.requests[e.choice]).state is FINISHED]
        self._deliver(advanced)

    def _deliver(self, requests: Sequence[Request]) -> None:
        now = time.perf_counter()
        updates = []
        for request in requests:
            entry = self._entries.get(request.id)
            if entry is None:
                continue
            tokens = request.tokens[entry.sent :]
            finished = request.state is FINISHED
            if tokens:
                self.generated += len(tokens)
                self.metrics.tokens(len(tokens), now - (entry.last or entry.added), first=not entry.sent)
                entry.sent, entry.first, entry.last = entry.sent + len(tokens), entry.first or now, now
            if finished:
                del self._entries[request.id]
                self.metrics.finished(request, now - entry.added)
                if self.tracing is not None:
                    times = Times(entry.added, request.begun, entry.first, now)
                    self.tracing.finished(request, times, entry.job.parent)
            if finished or entry.job.streams:
                given = tokens if entry.job.streams else ()
                updates.append((entry.job, Update(entry.choice, given, request.finish_reason, request.error)))
        if updates:
            self._to_loop(self._post, updates)

    def _add(self, job: Job) -> None:
        try:
            for choice, request in enumerate(job.requests):
                self.engine.add(request)
                self._entries[request.id] = _Entry(job, choice, time.perf_counter())
        except Exception:
            for request in job.requests:
                if self._entries.pop(request.id, None):
                    self.engine.cancel(request.id)
            raise
        for request in job.requests:
            self.metrics.added(request)

    def _cancel(self, job: Job) -> None:
        self._deliver([request for request in job.requests if self.engine.cancel(request.id)])

    def _to_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
            self._loop.call_soon_threadsafe(function, *arguments)


def _failed() -> ApiError:
    return ApiError(500, "the engine has failed; the server's log says why", code="engine_failed")


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
