"""Calls of compilers and other programs, with the error Missing if one is missing or fails."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PLUGINS = Path(__file__).resolve().parent.parent
ROOT = PLUGINS.parent
CACHE = ROOT / "build-cache"


class Missing(Exception):
    """A build needs something that this machine lacks, or a compiler failed."""


def tool(name: str, *, get: str = "") -> str:
    """Return the path of a program.

    Args:
        name: The program.
        get: The command that installs it, for the error message.

    Raises:
        Missing: It was not found.
    """
    path = shutil.which(name) or (shutil.which(name, path="/usr/local/cuda/bin") if name == "nvcc" else None)
    if path is None:
        raise Missing(f"{name} was not found" + (f" ({get})" if get else ""))
    return path


def host_compiler() -> str:
    """Return the C++ compiler: that of the variable CXX, or g++."""
    return tool(os.environ.get("CXX", "g++"))


def run(command: Sequence[str], what: str) -> str:
    """Run a command and return its output.

    Args:
        command: The program and its arguments.
        what: The program's role, for the error message.

    Raises:
        Missing: The command failed; the message has the last 4,000 characters of its output.
    """
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise Missing(f"the {what} failed:\n" + (process.stdout + process.stderr)[-4000:])
    return process.stdout + process.stderr


def digest(*contents: str | bytes) -> str:
    """Return a digest of texts or bytes, in 32 hexadecimal digits."""
    of_all = hashlib.sha256()
    for content in contents:
        of_all.update(content.encode() if isinstance(content, str) else content)
        of_all.update(b"\0")
    return of_all.hexdigest()[:32]


@cache
def version(program: str) -> str:
    """Return the output of the program for `--version`."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout


def cached(path: Path, command: Sequence[str], what: str, log: Path | None = None) -> Path:
    """Return `path`, which a command writes unless it exists.

    Args:
        path: The file, whose name has a digest of everything on which its content depends.
        command: The program and its arguments, without the path of the output.
        what: The program's role, for the error message.
        log: The file for the command's output; the command runs again if this file is missing.

    Raises:
        Missing: The command failed.
    """
    files = [path, *([log] if log else [])]
    if all(file.is_file() for file in files):
        for file in files:
            file.touch()
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{os.getpid()}-{path.name}")
    output = run([*command, "-o", str(new)], what)
    if log:
        log.write_text(output)
    return publish(new, path)


def link(command: Sequence[str], objects: Sequence[Path], library: Path, libraries: Sequence[str] = ()) -> Path:
    """Link object files, which are then removed, and libraries into `library`; return its path."""
    new = library.with_suffix(f".{os.getpid()}")
    library.parent.mkdir(parents=True, exist_ok=True)
    try:
        run([*command, *map(str, objects), *libraries, "-o", str(new)], "linker")
    finally:
        for path in objects:
            path.unlink()
    return publish(new, library)


def publish(new: Path, library: Path) -> Path:
    """Rename a file to `library` and return that path; a process that has the old file mapped keeps it."""
    new.replace(library)
    return library
