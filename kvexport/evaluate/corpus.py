"""Texts for evaluation: source code of Python's standard library, and Python's reference manual (English prose).

Some modules of the library, always the same, are held out from training. The texts come from the running interpreter,
so two Python versions have different texts.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

from kvexport.errors import EnvironmentProblem

# Skipped folders: tables of data, tests (an installation may lack them), and third-party packages
SKIPPED = {"encodings", "pydoc_data", "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_ONE_IN = 12


def is_held_out(module: str) -> bool:
    """Return whether a standard library module is held out from training: the CRC-32 of its name is divisible by 12."""
    return zlib.crc32(module.encode()) % HELD_OUT_ONE_IN == 0


def library_sources(held_out: bool) -> dict[str, str]:
    """Return the source code of the standard library modules that are (or are not) held out from training, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = {}
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).parts
        if not SKIPPED.intersection(names) and is_held_out(names[0].removesuffix(".py")) == held_out:
            sources["/".join(names)] = path.read_text(encoding="utf-8", errors="replace")
    return sources


def manual() -> str:
    """Return Python's reference manual from the interpreter's `help`: 450 kB of prose with examples, by topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        problem = "this Python came without its reference manual (pydoc_data.topics)"
        raise EnvironmentProblem(problem, "use a complete installation of Python, or --text FILE") from error
    return "\n".join(topics.values())
