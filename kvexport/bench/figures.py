"""Percentiles of measured times, in the form in which benchmark results show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not len(values):
        return {**{f"p{p}": None for p in PERCENTILES}, "mean": None, "max": None}
    percentiles = np.percentile(values, PERCENTILES)
    named: dict[str, float | None] = {f"p{p}": _ms(v) for p, v in zip(PERCENTILES, percentiles, strict=True)}
    return {**named, "mean": _ms(np.mean(values)), "max": _ms(np.max(values))}


def cells(figures: dict[str, Any]) -> list[float | None]:
    """Return p50, p90, p99, mean and maximum of a time in milliseconds, as a table row in the order of COLUMNS."""
    return [figures[f"p{p}"] for p in PERCENTILES] + [figures["mean"], figures["max"]]


COLUMNS = [*(f"p{p} ms" for p in PERCENTILES), "mean ms", "max ms"]


def _ms(seconds: Any) -> float:
    return round(float(seconds) * 1e3, 3)
