"""The server's sessions: conversations whose state stays between requests (docs/sessions.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from kvexport.errors import EnvironmentProblem, KvexportError, SnapshotError, UsageError
from kvexport.serve.errors import ApiError
from kvexport.serve.settings import ServeSettings
from kvexport.state.session_files import NAME
from kvexport.state.sessions import SessionStore
from kvexport.state.shared_sessions import SharedSessions
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest

T = TypeVar("T")
HEADER = "x-session-id"
log = logging.getLogger("kvexport.serve")


class Sessions:
    """A store, used by one thread at a time, which is never the event loop's: it may read and write files."""

    def __init__(self, manifest: Manifest, settings: ServeSettings) -> None:
        self.store = _store(manifest, settings)
        self.memory_bytes, self.disk_bytes = 0, self.store.disk_bytes  # after the last use
        self._manifest = manifest
        self._one = anyio.CapacityLimiter(1)

    async def get(self, name: str) -> Snapshot | None:
        """A session; None where there is none, or none that can be used: the conversation is then read anew."""
        try:
            return await self._in_turn(lambda: self.store.get(name))
        except (SnapshotError, EnvironmentProblem) as error:
            log.warning("%s", error.problem)
            return None

    async def keep(self, name: str, snapshot: Snapshot) -> None:
        """Keep a session. Where it cannot be kept, the next turn reads the conversation anew."""
        try:
            await self._in_turn(lambda: self.store.put(name, snapshot))
        except EnvironmentProblem as error:
            log.warning("%s", error.problem)

    async def delete(self, name: str) -> bool:
        """Forget a session; whether there was one."""
        return await self._in_turn(lambda: self.store.delete(name))

    async def take(self, name: str, data: bytes) -> None:
        """Keep a session that came from another server. Raises SnapshotError for one that cannot be used here."""
        await self._in_turn(lambda: self.store.put(name, Snapshot.from_bytes(data, self._manifest)))

    async def flush(self) -> None:
        """Write all sessions to the folder, where there is one."""
        try:
            await self._in_turn(self.store.flush)
        except KvexportError as error:
            log.error("%s", error.problem)

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


def session_name(request: Request, given: str | None, answers: int = 1) -> str | None:
    """The session of a request: of its body, else of its header. Raises ApiError for one that cannot be."""
    name = given if given is not None else request.headers.get(HEADER)
    if name is None:
        return None
    if not NAME.fullmatch(name):
        said = "session_id: 1 to 64 letters, digits, - and _, the first a letter or a digit"
        raise ApiError(400, said, param="session_id")
    if answers > 1:
        raise ApiError(400, "n: a session goes on with one answer", param="n")
    return name
