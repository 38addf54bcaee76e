"""Sessions (stored conversations) in a folder that several processes share: a conversation can go on in any of them.

`put` writes every state at once, so a killed process loses no acknowledged turn. The states that this process used last
are also in memory; if another process has replaced a file, it is read again. If another process has replaced the state
that a turn began from, the turn is refused. A process that was stopped and continues therefore overwrites no newer
state.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from pathlib import Path

from kvexport.artifact.manifest import Manifest
from kvexport.state.session_files import (
    NAME,
    SUFFIX,
    KnownNames,
    SessionConflict,
    SessionLost,
    check_name,
    locked,
    problems,
    read_mark,
    read_session,
    temporary,
)
from kvexport.state.session_store import ANY
from kvexport.state.snapshot import MARK, Snapshot

_LEFT_BEHIND = 3600  # seconds; an older half-written file is of a process that was killed


class SharedSessions:
    """The stored conversations (sessions) of one artifact, in a folder that several processes share.

    Args:
        manifest: The manifest of the artifact.
        memory: Bytes that sessions in memory may take. The most recently used session stays in memory even if it is
            larger.
        folder: The folder, made if it is missing.
        disk: Bytes that all files may take. The most recently written file stays even if it is larger.

    Raises:
        EnvironmentProblem: The folder cannot be used.
    """

    def __init__(self, manifest: Manifest, *, memory: int, folder: Path, disk: int) -> None:
        self._manifest, self._memory, self._folder, self._disk = manifest, memory, folder, disk
        self._loaded: OrderedDict[str, tuple[bytes | None, Snapshot]] = OrderedDict()  # with the mark of the file
        self.disk_bytes = 0  # of all files, when this process wrote one last
        with problems(f"the folder of sessions {folder}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.glob(f".*{SUFFIX}.*"):
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - _LEFT_BEHIND:
                        path.unlink()
            self._known = KnownNames(folder)
        with locked(folder):
            self._bound_disk("")

    @property
    def memory_bytes(self) -> int:
        """The bytes that sessions cached in memory take."""
        return sum(snapshot.nbytes for _, snapshot in self._loaded.values())

    def get(self, name: str) -> Snapshot | None:
        """Return the stored state (snapshot) of a session; None if the name is new. Errors: see `SessionStore.get`."""
        check_name(name)
        mark = read_mark(name, self._path(name))
        known, snapshot = self._loaded.pop(name, (None, None))
        if mark is None:
            if name in self._known:
                raise SessionLost(name)
            return None
        if snapshot is None or known != mark:
            snapshot = read_session(name, self._path(name), self._manifest)
        self._load(name, mark, snapshot)
        return snapshot

    def mark(self, name: str) -> bytes | None:
        """Return a mark that identifies a session's stored state; None without one. `put` uses it to detect changes."""
        check_name(name)
        return read_mark(name, self._path(name))

    def put(self, name: str, snapshot: Snapshot, expected: bytes | None = ANY) -> None:
        """Write the state of a session in place of an earlier one. If that fails, the earlier state stays.

        Args:
            name: The session.
            snapshot: Its new state.
            expected: The mark of the state that the turn began from, None if there was none; ANY replaces any state.

        Raises:
            UsageError: No session can have the name.
            SessionConflict: The folder has another state than the expected one.
            EnvironmentProblem: The file cannot be written.
        """
        check_name(name)
        data, path = snapshot.to_bytes(), self._path(name)
        with problems(f"the session {name} is not kept: its file"):
            if len(data) > self._disk:
                raise OSError(f"it takes {len(data)} bytes, all files together may take {self._disk}")
            with temporary(path, data) as file, locked(self._folder):
                if expected != ANY and read_mark(name, path) != expected:
                    raise SessionConflict(name)
                self._known.add(name)
                file.replace(path)
                self._load(name, data[:MARK], snapshot)
                self._bound_disk(name)

    def delete(self, name: str) -> bool:
        """Delete a session and return whether it was known. Errors are those of `SessionStore.delete`."""
        check_name(name)
        self._loaded.pop(name, None)
        with problems(f"the session {name}"), locked(self._folder):
            known = name in self._known
            self._known.remove(name)
            try:
                self._path(name).unlink()
            except FileNotFoundError:
                return known
        return True

    def flush(self) -> None:
        """Do nothing, because every session is already written to the shared folder."""

    def _load(self, name: str, mark: bytes | None, snapshot: Snapshot) -> None:
        """Keep a session's state in memory, and drop the least recently used states if memory is short."""
        self._loaded[name] = mark, snapshot
        self._loaded.move_to_end(name)
        while self.memory_bytes > self._memory and len(self._loaded) > 1:
            self._loaded.popitem(last=False)

    def _bound_disk(self, newest: str) -> None:
        """Delete the oldest session files until the remaining files are within the disk limit.

        The caller holds the lock of the folder.
        """
        with problems("the folder of sessions"):
            files = []
            for path in self._folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):
                    if NAME.fullmatch(path.stem):
                        status = path.lstat()
                        files.append((status.st_mtime_ns, status.st_size, path))
            self.disk_bytes = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if self.disk_bytes <= self._disk:
                    break
                if path.stem != newest:
                    path.unlink(missing_ok=True)
                    self.disk_bytes -= size

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"
