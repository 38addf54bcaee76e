"""The server's sessions: conversations whose KV cache is stored between HTTP requests (docs/tasks/sessions.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from kvexport.errors import EnvironmentProblem, KvexportError, SnapshotError, UsageError
from kvexport.serve.errors import ApiError, overloaded
from kvexport.serve.settings import ServeSettings
from kvexport.state.session_files import NAME, SessionConflict, SessionLost
from kvexport.state.session_store import ANY, SessionStore
from kvexport.state.shared_sessions import SharedSessions
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest

T = TypeVar("T")
HEADER = "x-session-id"
RESTARTED = "X-Session-Restarted"  # a header of answers that read a conversation again because its state was lost
log = logging.getLogger("kvexport.serve")


@dataclass(frozen=True)
class Start:
    """The stored state that a new turn of a session (conversation) begins from.

    Attributes:
        snapshot: The state; None for a new session or a lost state.
        mark: The mark that identifies the state in the folder, which `Sessions.keep` compares.
        lost: "evicted" or "damaged" for a state that was stored but cannot be used, otherwise "".
    """

    snapshot: Snapshot | None = None
    mark: bytes | None = ANY
    lost: str = ""


class Sessions:
    """Asynchronous access to the server's stored sessions (conversations with their KV caches).

    One thread works on their files, so that the event loop never waits for them.

    Args:
        manifest: The manifest of the artifact.
        settings: The bounds and the folder.
    """

    def __init__(self, manifest: Manifest, settings: ServeSettings) -> None:
        self.store = _store(manifest, settings)
        self.memory_bytes, self.disk_bytes = 0, self.store.disk_bytes  # after the last use
        self._manifest = manifest
        self._one = anyio.CapacityLimiter(1)

    async def start(self, name: str, *, required: bool = False) -> Start:
        """Return the stored state that the next turn of a session begins from. A lost state is logged.

        Args:
            name: The session.
            required: Whether a lost state is an error. A completion cannot continue without the state. A chat request
                can, because it contains the whole conversation.

        Raises:
            ApiError: A required state is lost (410), or cannot be read now (503).
        """

        def work() -> Start:
            mark = self.store.mark(name)
            return Start(self.store.get(name), mark)

        try:
            return await self._in_turn(work)
        except (SnapshotError, EnvironmentProblem) as error:
            log.warning("%s", error.problem)
            if not required:
                return Start(lost="evicted" if isinstance(error, SessionLost) else "damaged")
            if isinstance(error, EnvironmentProblem):
                raise overloaded(error.problem, 5) from error
            message = f"{error.problem}. DELETE /v1/sessions/{name} begins it again"
            raise ApiError(410, message, code="session_lost", param="session_id") from error

    async def get(self, name: str) -> Snapshot | None:
        """Return the stored state (snapshot) of a session; None for a new name. Errors are those of `start`."""
        return (await self.start(name, required=True)).snapshot

    async def keep(self, name: str, snapshot: Snapshot, start: Start) -> None:
        """Store the state (KV cache and tokens) of a session after a turn of its conversation.

        Args:
            name: The session.
            snapshot: Its state after the turn.
            start: The state that the turn began from.

        Raises:
            ApiError: The state cannot be stored (507), or another turn has changed the session (409). The session then
                has the state before the turn.
        """
        try:
            await self._in_turn(lambda: self.store.put(name, snapshot, start.mark))
        except SessionConflict as error:
            raise ApiError(409, f"{error.problem}: {error.fix}", code="session_conflict") from error
        except EnvironmentProblem as error:
            log.warning("%s", error.problem)
            message = f"the turn was answered, but session {name} could not be kept: {error.problem}"
            raise ApiError(507, message, code="session_not_kept") from error

    async def delete(self, name: str) -> bool:
        """Delete a stored session, and return whether there was one."""
        return await self._in_turn(lambda: self.store.delete(name))

    async def take(self, name: str, data: bytes) -> None:
        """Store a session whose bytes came from another server.

        Raises:
            SnapshotError: The bytes are damaged, or of another artifact.
            EnvironmentProblem: The session cannot be stored.
        """
        await self._in_turn(lambda: self.store.put(name, Snapshot.from_bytes(data, self._manifest)))

    async def flush(self) -> None:
        """Write all sessions in memory to the session folder, if there is one. A failure is logged."""
        try:
            await self._in_turn(self.store.flush)
        except KvexportError as error:
            log.error("%s", error.problem)
        except MemoryError:
            log.error("the sessions in memory could not be written to their folder: not enough memory")

    async def _in_turn(self, work: Callable[[], T]) -> T:
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._one)
        finally:
            self.memory_bytes, self.disk_bytes = self.store.memory_bytes, self.store.disk_bytes


def _store(manifest: Manifest, settings: ServeSettings) -> SessionStore | SharedSessions:
    memory, disk = settings.session_memory, settings.session_disk
    folder = None if settings.session_folder is None else Path(settings.session_folder)
    if not settings.session_shared:
        return SessionStore(manifest, memory=memory, folder=folder, disk=disk)
    if folder is None:
        raise UsageError("sessions cannot be shared without a folder", "--session-folder DIR")
    return SharedSessions(manifest, memory=memory, folder=folder, disk=disk)


def session_name(request: Request, body_name: str | None, answers: int = 1) -> str | None:
    """Return the name of the session that an HTTP request belongs to, from its body or its header.

    Args:
        request: The request with its headers.
        body_name: The name in the body.
        answers: How many answers the request asks for.

    Raises:
        ApiError: No session can have the name, or the request asks for several answers.
    """
    name = body_name if body_name is not None else request.headers.get(HEADER)
    if name is None:
        return None
    if not NAME.fullmatch(name):
        message = "session_id: 1 to 64 letters, digits, - and _, the first a letter or a digit"
        raise ApiError(400, message, param="session_id")
    if answers > 1:
        raise ApiError(400, "n: a session goes on with one answer", param="n")
    return name
