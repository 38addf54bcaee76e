"""Compilers, and what is said where one is missing or fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PLUGINS = Path(__file__).resolve().parent.parent
ROOT = PLUGINS.parent
CACHE = ROOT / "build-cache"


class Missing(Exception):
    """Something that building takes is not there, or a compiler failed."""


def tool(name: str, *, get: str = "") -> str:
    """The path of a program. get: the line that installs it."""
    path = shutil.which(name) or (shutil.which(name, path="/usr/local/cuda/bin") if name == "nvcc" else None)
    if path is None:
        raise Missing(f"{name} was not found" + (f" ({get})" if get else ""))
    return path


def host_compiler() -> str:
    """The C++ compiler: the variable CXX, or g++."""
    return tool(os.environ.get("CXX", "g++"))


def run(command: Sequence[str], what: str) -> str:
    """What the command says; Missing where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"the {what} failed:\n" + (done.stdout + done.stderr)[-4000:])
    return done.stdout + done.stderr


def link(command: Sequence[str], objects: Sequence[Path], library: Path, libraries: Sequence[str] = ()) -> Path:
    """Link object files, which are removed, into `library`."""
    made = library.with_suffix(f".{os.getpid()}")
    library.parent.mkdir(parents=True, exist_ok=True)
    try:
        run([*command, *map(str, objects), *libraries, "-o", str(made)], "linker")
    finally:
        for path in objects:
            path.unlink()
    return publish(made, library)


def publish(made: Path, library: Path) -> Path:
    """Renamed into place: a process that has the old one mapped keeps it."""
    made.replace(library)
    return library
