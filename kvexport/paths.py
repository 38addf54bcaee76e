"""The folders of the kvexport package and of its repository."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
# The first chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865).
TEXT = PACKAGE / "validate" / "text.txt"


def native_folder() -> Path:
    return PACKAGE / "_native"


def checkout() -> Path | None:
    """Return the repository that kvexport is imported from; None if kvexport is an installed package."""
    root = PACKAGE.parent
    return root if (root / "plugins" / "build.py").is_file() else None
