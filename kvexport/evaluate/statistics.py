"""Confidence intervals of means, by the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    value: float  # figure
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    count: int  # number of independent samples

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


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
