"""Confidence intervals: Wilson's for shares, the bootstrap for means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z = 1.959964  # the normal quantile of 97.5 %
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    value: float  # figure
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    count: int  # number of independent samples

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def share(hits: int, count: int) -> Estimate:
    """Return the fraction `hits` / `count` with Wilson's score interval (Wilson 1927), which is never of width 0."""
    if not 0 <= hits <= count or not count:
        raise ValueError(f"{hits} hits of {count}")
    p, z2 = hits / count, Z * Z
    centre = p + z2 / (2 * count)
    half = Z * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count))
    # Rounding must not move an end past the share itself.
    low, high = (centre - half) / (1 + z2 / count), (centre + half) / (1 + z2 / count)
    return Estimate(p, min(max(low, 0.0), p), max(min(high, 1.0), p), count)


def mean(values: Sequence[float] | NDArray[np.float64], seed: int = 0) -> Estimate:
    """Return the mean of independent values with the interval of the percentile bootstrap (Efron 1979).

    If a value is NaN or infinite, the ends of the interval are NaN.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("a mean of nothing")
    if not np.isfinite(data).all():
        return Estimate(float(data.mean()), math.nan, math.nan, data.size)
    drawn = np.random.default_rng(seed).integers(0, data.size, (RESAMPLES, data.size))
    low, high = np.quantile(data[drawn].mean(1), (0.025, 0.975))
    value = float(data.mean())
    return Estimate(value, min(float(low), value), max(float(high), value), data.size)
