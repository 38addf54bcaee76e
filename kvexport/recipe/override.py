"""`--set KEY=VALUE`: what a command line puts over a recipe's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvexport.recipe.parse import Findings, Origin, Source, Tree, merge, nest


def read_overrides(overrides: Sequence[str], found: Findings) -> Tree:
    """The overrides as one tree, a later one over an earlier one; what is no override becomes a problem."""
    layer = Tree({}, Origin("", "", Path.cwd()))
    for text in overrides:
        label = f"--set {text}" if text.isprintable() else f"--set {text!r}"
        dotted, equals, value = text.partition("=")
        key = tuple(part.strip() for part in dotted.split("."))
        if not equals or not all(key) or len(key) > 8:
            found.lose(f"{label}: should be --set KEY=VALUE with a dotted key, such as --set cache.budget=512")
        elif key[0] == "extends":
            found.problems.append(f"{label}: extends is written in a file, not set")
        else:
            entry = Source(label, Path.cwd(), False, found).read(value)
            if entry is not None:
                layer = merge(layer, nest(key, entry))
    return layer
