"""Helpers for result files of an evaluation: digests, atomic writes, and a lock on a folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvexport.errors import UsageError


def digest_of(*values: Any) -> str:
    """Return the SHA-256, in hex, of the JSON of the given values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that is raised within the `with` block, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that it is complete or absent after a crash.

    A full disk raises an OSError that names the file.
    """
    partial = path.with_name(path.name + ".part")
    with naming(partial):
        try:
            with partial.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder within the `with` block, so that no other process uses it."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another evaluation works in {folder}", "--work with another directory, or wait for it"
            ) from None
        yield
