"""One session as a file: its name, read whole and checked, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from kvexport.artifact.manifest import Manifest
from kvexport.errors import EnvironmentProblem, SnapshotError, UsageError
from kvexport.state.snapshot import MARK, Snapshot

SUFFIX = ".session"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def check_name(name: str) -> None:
    """Raises UsageError for a name that no session can have."""
    if not NAME.fullmatch(name):
        raise UsageError(f"no session can have the name {name[:80]!r}", "1 to 64 letters, digits, - and _")


def read_session(name: str, path: Path, manifest: Manifest) -> Snapshot:
    """A session's file, which is no link. Raises SnapshotError where it is damaged or of another artifact,
    EnvironmentProblem where it cannot be read."""
    try:
        with problems(f"the session {name}"):
            return Snapshot.from_bytes(_read(path), manifest)
    except SnapshotError as error:
        raise SnapshotError(f"the session {name} cannot be used: {error.problem}", "delete it") from error


def read_mark(name: str, path: Path) -> bytes | None:
    """Of a session's file what tells it from every other: its first bytes, which hold a digest of all. None where there
    is no file. Raises EnvironmentProblem where it cannot be read."""
    with problems(f"the session {name}"), contextlib.suppress(FileNotFoundError):
        return _read(path, MARK)
    return None


def _read(path: Path, size: int = -1) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is no file")
        return file.read(size)


def write_file(path: Path, data: bytes) -> None:
    """The whole file, or none of it."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def problems(what: str) -> Iterator[None]:
    """Errors of files as those that a user can read."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{what} cannot be used: {error.strerror or error}", "free disk space, or another folder for sessions"
        ) from error
