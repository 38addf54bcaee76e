"""Percentiles, and how results show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99, mean and largest of some seconds, in milliseconds; null where there are none."""
    if not len(values):
        return {**{f"p{p}": None for p in PERCENTILES}, "mean": None, "max": None}
    found = np.percentile(values, PERCENTILES)
    named: dict[str, float | None] = {f"p{p}": _ms(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return {**named, "mean": _ms(np.mean(values)), "max": _ms(np.max(values))}


def cells(figures: dict[str, Any]) -> list[float | None]:
    """A row of a table of `percentiles`."""
    return [figures[f"p{p}"] for p in PERCENTILES] + [figures["mean"], figures["max"]]


COLUMNS = [*(f"p{p} ms" for p in PERCENTILES), "mean ms", "max ms"]


def cumulated(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """x in milliseconds and the share of values that are no larger, at most 200 points."""
    shares = np.linspace(0, 1, min(max(len(values), 2), 200))
    return [_ms(v) for v in np.quantile(values, shares)], shares.tolist()


def _ms(seconds: Any) -> float:
    return round(float(seconds) * 1e3, 3)
