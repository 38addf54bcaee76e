"""Text to measure on: the Python standard library's own source, of which fixed modules are held out from training, and
Python's reference manual, English prose.

The text is that of the interpreter which runs, so figures of two Python versions are not of the same text.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

from kvexport.errors import EnvironmentProblem

# Tables of data, tests (an installation may lack them), and what is not the library's.
SKIPPED = {"encodings", "pydoc_data", "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_ONE_IN = 12


def is_held_out(module: str) -> bool:
    """Whether a top-level module ("json", "argparse") is for measuring: CRC-32 of its name divisible by 12."""
    return zlib.crc32(module.encode()) % HELD_OUT_ONE_IN == 0


def library_sources(held_out: bool) -> dict[str, str]:
    """The source of every module of the running interpreter's library which is (or is not) held out, by path, in order
    of path."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIPPED.intersection(parts) and is_held_out(parts[0].removesuffix(".py")) == held_out:
            sources["/".join(parts)] = path.read_text(encoding="utf-8", errors="replace")
    return sources


def manual() -> str:
    """Python's reference manual, as the interpreter's `help` has it: 450 kB of prose with examples, by topic. Raises
    EnvironmentProblem where an installation lacks it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        problem = "this Python came without its reference manual (pydoc_data.topics)"
        raise EnvironmentProblem(problem, "use a complete installation of Python, or --text FILE") from error
    return "\n".join(topics.values())
