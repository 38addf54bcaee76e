"""Shared parts of the tables in docs/ and README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BUDGETS = {0.05: "1/20", 0.125: "1/8", 0.25: "1/4", 0.5: "1/2"}


def load(name: str) -> Any:
    """Return the content of benchmarks/results/NAME.json."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def table(*rows: tuple[str, ...]) -> str:
    """Return a table in Markdown; the first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def name_of(label: str) -> str:
    """Return a label as Markdown: "keepkv:cache.recent=0.1" as "`keepkv`, recent 0.1"."""
    method, *settings = label.split(":")
    return ", ".join(
        [
            f"`{method}`",
            *(setting.removeprefix("cache.").removeprefix("export.").replace("=", " ") for setting in settings),
        ]
    )


def shown(estimate: dict[str, float]) -> str:
    """Return a figure with its interval."""
    return f"{estimate['value']:.3g} [{estimate['low']:.2g}, {estimate['high']:.2g}]"
