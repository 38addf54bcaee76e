"""Atomic replacement of a folder: the new folder is written under another name and then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvexport.artifact.publish import beside, exchange, place, sync_tree
from kvexport.errors import EnvironmentProblem, UsageError


@contextmanager
def replaced(target: Path, kind: str, is_one: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` when the block ends, and is removed if the block raises.

    A kill leaves at most a hidden folder `.NAME.stage-*` next to the target.

    Args:
        target: Path of the finished folder.
        kind: A description of the folder for messages.
        is_one: Whether an existing folder may be replaced.

    Raises:
        UsageError: `target` exists and may not be replaced.
        EnvironmentProblem: The file system refuses an operation.
    """
    target = place(Path(target))
    _refuse_other(target, kind, is_one)
    work = beside(target, f"stage-{secrets.token_hex(8)}")
    try:
        work.mkdir()
        yield work
        sync_tree(work)
        _refuse_other(target, kind, is_one)
        if target.exists() and any(target.iterdir()):
            _exchange(work, target)
        else:
            work.rename(target)
    except OSError as error:
        where = error.filename or work
        raise EnvironmentProblem(
            f"{where} cannot be written: {error.strerror or error}", "choose another --out"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_other(target: Path, kind: str, is_one: Callable[[Path], bool]) -> None:
    if not os.path.lexists(target):
        return
    if target.is_dir() and target.samefile("."):
        raise UsageError(f"{target} is the current directory, which cannot be replaced", "choose another --out")
    if target.is_symlink() or not target.is_dir() or (any(target.iterdir()) and not is_one(target)):
        raise UsageError(
            f"{target} exists and is no {kind} that kvexport wrote; it was left alone",
            "choose another --out, or remove it first",
        )


def _exchange(work: Path, target: Path) -> None:
    if exchange(work, target):
        return
    old = beside(target, f"stage-{secrets.token_hex(8)}")
    target.rename(old)
    try:
        work.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
