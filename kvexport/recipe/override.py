"""The overrides of recipe keys on a command line, `--set KEY=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvexport.recipe.parse import Findings, Origin, Source, Tree, merge, nest


def read_overrides(overrides: Sequence[str], findings: Findings) -> Tree:
    layer = Tree({}, Origin("", "", Path.cwd()))
    for text in overrides:
        label = f"--set {text}" if text.isprintable() else f"--set {text!r}"
        dotted, equals, value = text.partition("=")
        key = tuple(name.strip() for name in dotted.split("."))
        if not equals or not all(key) or len(key) > 8:
            findings.lose(f"{label}: should be --set KEY=VALUE with a dotted key, such as --set cache.budget=512")
        elif key[0] == "extends":
            findings.problems.append(f"{label}: extends is written in a file, not set")
        else:
            entry = Source(label, Path.cwd(), False, findings).read(value)
            if entry is not None:
                layer = merge(layer, nest(key, entry))
    return layer
