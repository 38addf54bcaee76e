"""Files of stored conversations (sessions): names, one state file for each session, a list of known names, and a lock.

A file is written whole or not at all, and only its owner can read it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from kvexport.artifact.manifest import Manifest
from kvexport.errors import EnvironmentProblem, SnapshotError, UsageError
from kvexport.state.snapshot import MARK, Snapshot

SUFFIX = ".session"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST_NAMES = 10_000
_LOCK_SECONDS = 5.0  # a process that is stopped while it has the lock keeps others from writing
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class SessionLost(SnapshotError):
    """The error for a session (stored conversation) whose state is gone: it was evicted, or its process was killed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the state of session {name} is gone: it was evicted, or the server that had it in memory was killed",
            "delete the session and begin again, or use another name",
        )


class SessionConflict(SnapshotError):
    """The error for a session (stored conversation) that another turn has changed since this turn began."""

    def __init__(self, name: str) -> None:
        super().__init__(f"session {name} was changed by another turn while this turn ran", "send the turn again")


def check_name(name: str) -> None:
    """Check that a string can be the name of a session (stored conversation).

    Raises:
        UsageError: The name is too long, or has characters other than letters, digits, "-" and "_".
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"no session can have the name {name[:80]!r}", "1 to 64 letters, digits, - and _")


def read_session(name: str, path: Path, manifest: Manifest) -> Snapshot:
    """Return the snapshot in the file of a session (stored conversation). A symbolic link is not followed.

    Raises:
        SnapshotError: The file is damaged, or belongs to another artifact.
        EnvironmentProblem: The file cannot be read.
    """
    try:
        with problems(f"the session {name}"):
            return Snapshot.from_bytes(_read(path), manifest)
    except SnapshotError as error:
        raise SnapshotError(f"the session {name} cannot be used: {error.problem}", "delete it") from error


def read_mark(name: str, path: Path) -> bytes | None:
    """Return the first bytes of a session's file, which identify the stored state by a digest.

    Returns:
        48 bytes that differ between any two states, or None if there is no file.

    Raises:
        EnvironmentProblem: The file cannot be read.
    """
    with problems(f"the session {name}"), contextlib.suppress(FileNotFoundError):
        return _read(path, MARK)
    return None


def _read(path: Path, size: int = -1) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is no file")
        return file.read(size)


@contextlib.contextmanager
def temporary(path: Path, data: bytes) -> Iterator[Path]:
    """Write `data` to a temporary file next to `path`, and yield its path so that the caller can rename it to `path`.

    A file that was not renamed is deleted.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield beside
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the session folder, so that no other process changes it between a check and a rename.

    On a file system without locks, nothing is locked.

    Raises:
        EnvironmentProblem: Another process has held the lock for 5 seconds.
    """
    with problems("the folder of sessions"):
        number = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    break
                if time.monotonic() > end:
                    problem = f"another process holds the lock of the sessions for {_LOCK_SECONDS:g} seconds"
                    raise EnvironmentProblem(problem, f"end the process that holds {folder / '.lock'}") from error
            time.sleep(0.005)
        yield
    finally:
        os.close(number)


class KnownNames:
    """The names of all sessions that were ever stored and not deleted, whether or not their state still exists.

    The names distinguish a session whose state is lost from a new session. The 10,000 most recently used names are
    kept.

    Args:
        folder: The folder of sessions. None keeps the names in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / ".known"
        self._names: OrderedDict[str, None] = OrderedDict()
        if self._folder is not None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            files = sorted(self._folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
            for path in files[:-_MOST_NAMES]:
                path.unlink(missing_ok=True)
            self._names.update((path.name, None) for path in files[-_MOST_NAMES:])

    def __contains__(self, name: str) -> bool:
        """Return whether a session of this name was stored before, by this process or by another one."""
        return name in self._names if self._folder is None else (self._folder / name).exists()

    def add(self, name: str) -> None:
        """Record that a session of this name has been stored.

        Raises:
            OSError: The folder cannot be written.
        """
        if self._folder is not None and name not in self:
            os.close(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._names[name] = None
        self._names.move_to_end(name)
        while len(self._names) > _MOST_NAMES:
            self.remove(next(iter(self._names)))

    def remove(self, name: str) -> None:
        """Remove a session's name from the known names, because the session was deleted."""
        self._names.pop(name, None)
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def problems(subject: str) -> Iterator[None]:
    """Turn an OSError within the `with` block into an EnvironmentProblem whose message names `subject`."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{subject} cannot be used: {error.strerror or error}", "free disk space, or another folder for sessions"
        ) from error
