"""Tables of the rules of newer papers, measured by `newer_methods.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from table_parts import load, shown, table

DRAWS = 2000
# The row of the first group with which others of the group are compared, and that of the second.
OWN, MERGING = "h2o", "ballot"


def _base(name: str) -> str:
    return MERGING if name.startswith(f"{MERGING},") else OWN


def _estimate(blocks: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean of figures [texts, blocks] with its interval of 95 %, from a bootstrap of each text's blocks."""
    rng, means = np.random.default_rng(0), []
    for text in blocks:
        means.append(text[rng.integers(0, len(text), (DRAWS, len(text)))].mean(1))
    low, high = np.quantile(np.mean(means, 0), (0.025, 0.975))
    return {"value": float(blocks.mean()), "low": float(low), "high": float(high)}


def newer_methods(part: str) -> str:
    """Return the table of one part: KL and added loss of each row, and its difference to its baseline."""
    results: dict[str, dict[str, Any]] = load("newer-methods")["parts"][part]
    lines = []
    for slots in sorted(results, key=int):
        rows = {name: {key: np.array(row[key]) for key in ("kl", "loss")} for name, row in results[slots].items()}
        groups: tuple[list[str], list[str]] = ([], [])
        for name in sorted(rows, key=lambda name: float(rows[name]["kl"].mean())):
            groups[name.startswith(MERGING)].append(name)
        for name in (*groups[0], *groups[1]):
            kl, loss = rows[name]["kl"], rows[name]["loss"]
            base, difference, better = _base(name), "", ""
            if base in rows and name not in (OWN, MERGING):
                difference = f"{shown(_estimate(kl - rows[base]['kl']))}, `{base}`"
                lower = int((kl.mean(1) < rows[base]["kl"].mean(1)).sum())
                better = f"{lower} of {len(kl)}"
            title = ", ".join([f"`{x}`" if x in KNOWN else x for x in name.split(", ")])
            lines.append((slots, title, shown(_estimate(kl)), f"{loss.mean():.3f}", difference, better))
    return table(("slots", "method", "KL, nats", "added loss", "KL minus that of", "lower on"), *lines)


KNOWN = ("random", "h2o", "snapkv", "zeromerge", "keepkv", "ballot")
