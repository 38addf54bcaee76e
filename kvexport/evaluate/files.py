"""Files that outlive a run: digests of what they depend on, writing that leaves no half of one, one run at a time."""

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


def digest_of(*parts: Any) -> str:
    """SHA-256, in hex, of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block, such as of a full disk, names the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or not at all, whatever happens. A full disk is an OSError that names it."""
    part = path.with_name(path.name + ".part")
    with naming(part):
        try:
            with part.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nothing else runs such a block of this folder meanwhile. Raises UsageError where another process does."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another evaluation works in {folder}", "--work with another directory, or wait for it"
            ) from None
        yield
