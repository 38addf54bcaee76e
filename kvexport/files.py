"""Atomic writing of files, which leaves no partial file after an interruption, and digests of files and JSON."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PART = ".part"  # the end of the name of a file that is being written
_CHUNK = 4 << 20  # with smaller blocks, a thread that shares the interpreter with a busy one mostly waits for it


@contextmanager
def new_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a hidden file beside `path`, which replaces `path` when the block ends without an error.

    The content is on the disk before the file gets the name `path`, so that a crash leaves either the old file or the
    new file, complete. An OSError names the file.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PART}")
    try:
        # A link at this name, which another user may have made, is not followed.
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b") as file:
            yield file
            sync(file)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        with suppress(OSError):  # a folder that is read-only by now reports its first error
            part.unlink(missing_ok=True)


def write_file(path: Path, content: bytes | str) -> None:
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to the disk, so that a rename in the folder survives a loss of power."""
    with suppress(OSError):  # some file systems cannot do this, and write names by themselves soon
        number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def json_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def file_digests(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the SHA-256 of files under `root` in the given order.

    A few files are read at the same time, because hashlib lets other threads run.
    """
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    try:
        yield from pool.map(lambda name: _digest(root / name), names)
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(path: Path) -> str:
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()
