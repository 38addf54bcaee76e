"""The next token from the largest logits of a row alone, where they prove it: what lets the others stay on the device
that computed them.

`kvexport.language.sampling` says which token it is to be; what is settled here is settled to the same bits. A graph of
its own finds the largest logits on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvexport.backends.rows import MASS_ERROR, TopLogits

ROUNDING = 1e-5  # of a probability, in sums of float32 numbers


@dataclass(frozen=True)
class Scores:
    """The largest logits after everything that changes logits. ids, values: [n] int64, float32. floor: no other token
    of the row is above it. rest: the bounds of the sum of exp(score - largest score) over the other tokens."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    floor: np.float32
    rest: tuple[float, float]

    def top_k(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """The tokens not below the k-th largest; None where that may be another token, or be level with others."""
        above = self.values > self.floor
        if above.sum() < k:
            return None
        kept = np.flatnonzero(self.values >= np.partition(self.values, -k)[-k])
        return self._ascending(kept)

    def top_p(self, top_p: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """The likeliest tokens of this mass: of equal ones those of higher ids first. None where the bounds leave it
        open."""
        order = np.lexsort((-self.ids, -self.values))
        weights = np.exp((self.values[order] - self.values.max()).astype(np.float64))
        before = np.cumsum(weights) - weights  # of the tokens that go before each one
        low, high = (weights.sum() + rest for rest in self.rest)
        stays = before / low < top_p - ROUNDING
        stays[0] = True
        count = int(stays.sum())
        # What is level with the floor is level with tokens that are not here.
        if (
            count == order.size
            or before[count] / high <= top_p + ROUNDING
            or self.values[order[count - 1]] <= self.floor
        ):
            return None
        return self._ascending(order[:count])

    def min_p(self, min_p: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """The tokens at least this likely against the likeliest; None where rounding decides, or others may be among
        them."""
        ratios = np.exp((np.append(self.values, self.floor) - self.values.max()).astype(np.float64)) / min_p
        if min_p < 1e-30 or (np.abs(ratios - 1) < ROUNDING).any() or ratios[-1] > 1:
            return None
        return self._ascending(np.flatnonzero(ratios[:-1] > 1))

    def _ascending(self, chosen: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        chosen = chosen[np.argsort(self.ids[chosen])]
        return self.ids[chosen], self.values[chosen]


def scores_of(top: TopLogits, values: npt.NDArray[np.float32], temperature: float) -> Scores | None:
    """The largest logits over the temperature, after penalties made them `values`, none higher than before (nor would
    those of other tokens be). None where the row cannot be sampled from: the whole of it will say why."""
    ids, floor = top.ids.astype(np.int64), top.values[-1:]
    if not (math.isfinite(top.mass) and math.isfinite(top.values[0])):
        return None
    if temperature != 1.0:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scaled, floor = values / temperature, floor / temperature
    else:
        scaled = values
    if not math.isfinite(scaled.max()):
        return None
    lowered = values is not top.values
    low, high = _rest(top, 1 / temperature)
    fallen = float(top.values[0]) / temperature - float(scaled.max())  # from the largest logit to the largest score
    if fallen > 500:
        return None
    rebase = math.exp(fallen)
    return Scores(ids, scaled, floor[0], (0.0 if lowered else low * rebase, high * rebase))


def _rest(top: TopLogits, power: float) -> tuple[float, float]:
    """Bounds of the sum of x**power over the other tokens, x = exp(logit - largest): known are the sum of x, how many
    there are, and that each is at most the last of the largest."""
    others = top.vocabulary - top.ids.size
    x = np.exp((top.values - top.values[0]).astype(np.float64))
    least, most = (max(top.mass * (1 + sign * MASS_ERROR) - float(x.sum()), 0.0) for sign in (-1, 1))
    largest = max(float(x[-1]), 1e-300)

    def as_one(mass: float) -> float:
        """Were they all alike: the least sum for a power above 1, the most for one below (Jensen)."""
        return float(others * (mass / others) ** power)

    def as_few(mass: float) -> float:
        """Were they all as large as they may be."""
        return float(mass * largest ** (power - 1))

    return (as_one(least), as_few(most)) if power >= 1 else (as_few(least), as_one(most))
