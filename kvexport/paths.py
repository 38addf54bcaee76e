"""Where the package lies, and what lies beside it."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
# The first chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865).
TEXT = PACKAGE / "validate" / "text.txt"


def native_folder() -> Path:
    """Where the libraries of native operators and plugins are put when they are built."""
    return PACKAGE / "_native"


def checkout() -> Path | None:
    """The repository that the package is imported from; None where it is installed."""
    root = PACKAGE.parent
    return root if (root / "plugins" / "build.py").is_file() else None
