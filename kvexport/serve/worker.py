"""The engine of a server: one thread runs the engine's steps, and the event loop sends it the clients' requests.

No other thread uses the engine. The event loop queues function calls, such as the start of a client's request, which
the thread makes between two steps. After each step the thread sends all new tokens to the event loop in one message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import anyio

from kvexport.engine.engine import Engine
from kvexport.engine.request import FINISHED, FinishReason, Request
from kvexport.engine.thread import EngineThread
from kvexport.errors import EngineEndedError
from kvexport.language.token import Token
from kvexport.serve.errors import ApiError, engine_failed, overloaded
from kvexport.serve.metrics import Metrics

T = TypeVar("T")
log = logging.getLogger("kvexport.serve")


class Update(NamedTuple):
    choice: int  # number of the request within its job, from 0
    tokens: Sequence[Token]
    finish_reason: FinishReason | None = None  # reason if the request has finished, else None
    error: Exception | None = None  # error if finish_reason is "error"

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Job:
    """The engine requests of one HTTP call, and their updates that the client has not received yet.

    Only the event loop's thread uses a job. The engine requests of a job belong to the engine's thread until they
    finish.
    """

    def __init__(self, requests: Sequence[Request], *, streams: bool, buffer: int = 0) -> None:
        self.requests = requests
        self.streams = streams
        self.open = len(requests)  # requests that have not finished
        self.timer: asyncio.TimerHandle | None = None
        self._buffer, self._behind = buffer, 0
        self._updates: deque[Update] = deque()
        self._ready = asyncio.Event()
        self._error: ApiError | None = None

    def put(self, update: Update) -> bool:
        """Queue the tokens of an engine step for the HTTP handler. Return False if a stream's client is too slow."""
        self._updates.append(update)
        self._behind += len(update.tokens)
        self.open -= update.finish_reason is not None
        self._ready.set()
        return self._behind <= self._buffer or not self.streams

    def fail(self, error: ApiError) -> None:
        """End the job with an error, which `updates` raises in the HTTP handler."""
        self._error = self._error or error
        self._ready.set()

    async def updates(self, every: float) -> AsyncIterator[Update | None]:
        """Yield updates (new tokens) until all requests have finished; yield None after `every` seconds without."""
        while self._updates or self.open or self._error:
            if self._error:
                raise self._error
            if self._updates:
                update = self._updates.popleft()
                self._behind -= len(update.tokens)
                yield update
                continue
            self._ready.clear()
            with anyio.move_on_after(every) as quiet:
                await self._ready.wait()
            if quiet.cancelled_caught:
                yield None


@dataclass
class _Entry:
    job: Job  # job of the request
    choice: int  # number of the request within the job
    added: float  # time at which it was queued
    sent: int = 0  # number of tokens that were sent to the job
    last: float = 0.0  # time of its last token so far


class Worker:
    """The requests of all clients, and the thread in which an engine answers them."""

    def __init__(self, engine: Engine, metrics: Metrics, room: int) -> None:
        self.engine = engine
        self.metrics = metrics
        self.room = room
        self.pending = 0  # requests that have not finished, or are about to be queued
        self.draining = False
        self.failed = False  # an error ended the engine's thread: no request will be answered any more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(engine, self._deliver, lambda: self._to_loop(self._fail))
        self._entries: dict[int, _Entry] = {}
        self._jobs: set[Job] = set()

    # The methods below run in the event loop's thread.

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.alive and not self.draining

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._thread.call(function), loop=self._loop)

    async def submit(self, job: Job) -> None:
        """Queue the engine requests of a job. The caller must call `cancel` for the job afterwards in every case."""
        if self.failed:
            raise engine_failed()
        if self.draining:
            raise overloaded("the server is shutting down", 5)
        count = len(job.requests)
        self.require_room(count)
        added = self.call(lambda: self._add(job))
        self.pending += count
        self._jobs.add(job)
        added.add_done_callback(lambda future: self._rejected(job) if future.exception() else None)
        await asyncio.shield(added)  # `_rejected` is called even if the client goes away now

    def require_room(self, count: int) -> None:
        if self.pending + count > self.room:
            waiting = max(0, self.pending - self.engine.max_batch)
            raise overloaded(f"the queue is full: {waiting} requests wait, and no more than that may")

    def _rejected(self, job: Job) -> None:
        self.pending -= len(job.requests)
        self._jobs.discard(job)

    def cancel(self, job: Job) -> None:
        """Cancel the requests of a job that still run. Their batch lanes become free at the next engine step."""
        if job.open and job in self._jobs:
            with suppress(EngineEndedError):  # the thread has ended, and with it all requests
                self._thread.call(lambda: self._cancel(job)).add_done_callback(_log_error)

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and cancel the running requests if they take longer than `seconds` seconds."""
        self.draining = True
        end = time.monotonic() + seconds
        while self._jobs and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for job in list(self._jobs):
            job.fail(overloaded("the server is shutting down", 5))
            self.cancel(job)

    async def close(self) -> None:
        self.draining = True
        with suppress(EngineEndedError):
            await self.call(self._cancel_all)
        self._thread.end()
        await asyncio.to_thread(self._thread.join)

    def _fail(self) -> None:
        self.failed = True
        for job in self._jobs:
            job.fail(engine_failed())

    def _post(self, updates: Sequence[tuple[Job, Update]]) -> None:
        for job, update in updates:
            self.pending -= update.finish_reason is not None
            if not job.put(update):
                job.fail(ApiError(499, "the reader fell too far behind"))
                self.cancel(job)
            if not job.open:
                self._jobs.discard(job)

    # The methods below run in the engine's thread.

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
                self.metrics.tokens(len(tokens), now - (entry.last or entry.added), first=not entry.sent)
                entry.sent, entry.last = entry.sent + len(tokens), now
            if finished:
                del self._entries[request.id]
                self.metrics.finished(request, now - entry.added)
            if finished or entry.job.streams:
                new = tokens if entry.job.streams else ()
                updates.append((entry.job, Update(entry.choice, new, request.finish_reason, request.error)))
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

    def _cancel_all(self) -> None:
        for job in {entry.job for entry in self._entries.values()}:
            self._cancel(job)

    def _to_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, so nobody waits for the message
            self._loop.call_soon_threadsafe(function, *arguments)


def _log_error(call: Future[None]) -> None:
    if (error := call.exception()) is not None and not isinstance(error, EngineEndedError):
        log.error("a call in the engine's thread failed", exc_info=error)
