"""The server's sessions: conversations whose KV cache is stored between HTTP requests (docs/tasks/sessions.md).

The turns of a session run one after the other. A turn holds the lock of its session from before the session's state is
read until the turn's HTTP response has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
from starlette.requests import Request

from kvexport.errors import EnvironmentProblem, SnapshotError, UsageError
from kvexport.serve.errors import ApiError, overloaded
from kvexport.serve.settings import ServeSettings
from kvexport.serve.streams import unless_gone
from kvexport.state.sessions import ANY, NAME, SessionConflict, SessionLost, SessionStore
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest

T = TypeVar("T")
HEADER = "x-session-id"
ENDS = "kvexport.ends"  # a key of the ASGI scope: an exit stack that is closed after the response was sent
RESTARTED = "X-Session-Restarted"  # a header of responses whose conversation was read again, because its state was lost
_LOOK_SECONDS = 0.02  # between two tries to lock a session in which another server runs a turn
log = logging.getLogger("kvexport.serve")


@dataclass(eq=False)
class Turn:
    """One turn of a session (conversation): an HTTP request that names the session."""

    name: str  # session
    request: Request  # HTTP request
    snapshot: Snapshot | None = None  # stored state that the turn begins from; None for a new session or a lost state
    mark: bytes | None = ANY  # mark that identifies the state in the folder, which `Sessions.keep` compares
    lost: str = ""  # "evicted" or "damaged" for a state that was stored but cannot be used, otherwise ""
    waited: float = 0.0  # seconds that the turn waited for earlier turns
    superseded: str = ""  # "deleted" or "replaced" if a client did that to the session while the turn ran, otherwise ""


@dataclass
class _Line:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    turns: int = 0
    running: Turn | None = None


class Sessions:
    """Asynchronous access to the server's stored sessions (conversations with their KV caches).

    One thread reads and writes the session files, so that the event loop never waits for them.
    """

    def __init__(self, manifest: Manifest, settings: ServeSettings) -> None:
        folder = None if settings.session_folder is None else Path(settings.session_folder)
        if settings.session_shared and folder is None:
            raise UsageError("sessions cannot be shared without a folder", "--session-folder DIR")
        memory, disk = settings.session_memory, settings.session_disk
        self.store = SessionStore(manifest, memory=memory, folder=folder, disk=disk, shared=settings.session_shared)
        # As of the latest access
        self.memory_bytes, self.disk_bytes = 0, self.store.disk_bytes
        self._manifest, self._settings = manifest, settings
        # One thread runs all work in the order of its arrival, even the work whose client has gone meanwhile: the state
        # of a turn is never written after the next turn has begun.
        self._thread = ThreadPoolExecutor(1, "sessions")
        self._lines: dict[str, _Line] = {}
        self._waiting = 0

    async def begin(self, turn: Turn, *, required: bool = False) -> None:
        """Wait for the earlier turns of a session, and read the stored state that a turn begins from.

        The turn has the lock of its session until the response to its request has been sent. A lost state is logged,
        and raises ApiError if `required` is set.
        """
        ends: contextlib.AsyncExitStack = turn.request.scope[ENDS]
        began = time.monotonic()
        lock = self._locked(turn.name, turn)
        await unless_gone(turn.request.receive, lock.__aenter__())
        ends.push_async_exit(lock.__aexit__)
        turn.waited = time.monotonic() - began

        def work() -> None:
            turn.superseded = ""
            turn.mark = self.store.mark(turn.name)
            turn.snapshot = self.store.get(turn.name)

        try:
            await self._in_thread(work)
        except (SnapshotError, EnvironmentProblem) as error:
            log.warning("%s", error.problem)
            if not required:
                turn.lost = "evicted" if isinstance(error, SessionLost) else "damaged"
                return
            raise _unusable(turn.name, error) from error

    async def get(self, name: str) -> Snapshot | None:
        """Return the stored state (snapshot) of a session; None for a new name. A lost state raises ApiError."""
        try:
            return await self._in_thread(lambda: self.store.get(name))
        except (SnapshotError, EnvironmentProblem) as error:
            log.warning("%s", error.problem)
            raise _unusable(name, error) from error

    async def keep(self, turn: Turn, snapshot: Snapshot) -> None:
        """Store the state (KV cache and tokens) of a session after a turn. Raise ApiError if that is impossible."""

        def work() -> None:
            if turn.superseded:
                message = f"session {turn.name} was {turn.superseded} while this turn ran: send the turn again"
                raise ApiError(409, message, code="session_conflict")
            self.store.put(turn.name, snapshot, turn.mark)

        try:
            await self._in_thread(work)
        except SessionConflict as error:
            raise ApiError(409, f"{error.problem}: {error.fix}", code="session_conflict") from error
        except EnvironmentProblem as error:
            log.warning("%s", error.problem)
            message = f"the turn was answered, but session {turn.name} could not be kept: {error.problem}"
            raise ApiError(507, message, code="session_not_kept") from error

    async def delete(self, name: str) -> bool:
        """Delete a session, and return whether there was one. The session's running turn will not be stored."""

        def work() -> bool:
            known = self.store.delete(name)
            return self._supersede(name, "deleted") or known

        # The first turn of a session began from no state. If another server runs it, that server could not tell that
        # the session was deleted meanwhile, so its turn is waited for.
        line = self._lines.get(name)
        if (line is None or line.running is None) and await self._in_thread(lambda: self.store.mark(name)) is None:
            async with self._locked(name, None):
                return await self._in_thread(work)
        return await self._in_thread(work)

    async def take(self, name: str, data: bytes) -> None:
        """Store a session whose bytes came from another server. The session's running turn will not be stored."""

        def work() -> None:
            self.store.put(name, Snapshot.from_bytes(data, self._manifest))
            self._supersede(name, "replaced")

        await self._in_thread(work)

    def close(self) -> None:
        """Finish the reads and writes of session files, and let other servers use the session folder."""
        self._thread.shutdown()
        self.store.close()

    def _supersede(self, name: str, how: str) -> bool:
        line = self._lines.get(name)
        if line is None or line.running is None:
            return False
        line.running.superseded = how
        return True

    @contextlib.asynccontextmanager
    async def _locked(self, name: str, turn: Turn | None) -> AsyncIterator[None]:
        line = self._lines.setdefault(name, _Line())
        line.turns += 1
        try:
            async with self._in_line(line), self._other_servers(name):
                line.running = turn
                try:
                    yield
                finally:
                    line.running = None
        finally:
            line.turns -= 1
            if not line.turns:
                del self._lines[name]

    @contextlib.asynccontextmanager
    async def _in_line(self, line: _Line) -> AsyncIterator[None]:
        if line.lock.locked() and self._waiting >= self._settings.queue:
            raise overloaded(f"{self._waiting} turns of sessions wait for earlier ones, and no more than that may")
        self._waiting += 1
        try:
            with anyio.fail_after(self._settings.timeout):
                await line.lock.acquire()
        except TimeoutError:
            raise overloaded(f"earlier turns took longer than {self._settings.timeout:g} seconds", 5) from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            line.lock.release()

    @contextlib.asynccontextmanager
    async def _other_servers(self, name: str) -> AsyncIterator[None]:
        end = time.monotonic() + self._settings.timeout
        while not self.store.begin_turn(name):
            if time.monotonic() > end:
                raise overloaded(f"another server runs turns of session {name} for too long", 5)
            await asyncio.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            self.store.end_turn(name)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def counted() -> T:
            try:
                return work()
            finally:
                self.memory_bytes, self.disk_bytes = self.store.memory_bytes, self.store.disk_bytes

        return await asyncio.get_running_loop().run_in_executor(self._thread, counted)


def turn_of(request: Request, body_name: str | None, answers: int = 1) -> Turn | None:
    name = body_name if body_name is not None else request.headers.get(HEADER)
    if name is None:
        return None
    check_session_name(name)
    if answers > 1:
        raise ApiError(400, "n: a session goes on with one answer", param="n")
    return Turn(name, request)


def check_session_name(name: str) -> None:
    if not NAME.fullmatch(name):
        message = "session_id: 1 to 64 letters, digits, - and _, the first a letter or a digit"
        raise ApiError(400, message, param="session_id")


def _unusable(name: str, error: SnapshotError | EnvironmentProblem) -> ApiError:
    if isinstance(error, EnvironmentProblem):
        return overloaded(error.problem, 5)
    message = f"{error.problem}. DELETE /v1/sessions/{name} begins it again"
    return ApiError(410, message, code="session_lost", param="session_id")
