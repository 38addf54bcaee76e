"""Sampling from the n largest logits of a row, if they alone determine the next token.

All other logits then stay on the device that computed them. The token is exactly the one that
`kvexport.language.sampling` defines. A separate ONNX graph finds the largest logits on the device.
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
    """The n largest scores of a vocabulary row (logits after temperature and penalties), with bounds on all others."""

    ids: npt.NDArray[np.int64]  # token ids [n] int64
    values: npt.NDArray[np.float32]
    floor: np.float32  # no other token of the row has a higher score
    rest: tuple[float, float]  # bounds of the sum of exp(score - largest score) over the other tokens

    def top_k(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """Return the ids and scores of the `k` tokens of highest score; None if other tokens could be among them."""
        above = self.values > self.floor
        if above.sum() < k:
            return None
        kept = np.flatnonzero(self.values >= np.partition(self.values, -k)[-k])
        return self._ascending(kept)

    def top_p(self, top_p: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """Return the ids and scores of the tokens that top_p keeps; None if the largest logits do not decide which.

        Tokens of equal score are kept in the order of their ids, the highest id first.
        """
        order = np.lexsort((-self.ids, -self.values))
        weights = np.exp((self.values[order] - self.values.max()).astype(np.float64))
        before = np.cumsum(weights) - weights  # the sum of the weights before each token
        low, high = (weights.sum() + rest for rest in self.rest)
        stays = before / low < top_p - ROUNDING
        stays[0] = True
        count = int(stays.sum())
        # A score equal to the floor may be equal to scores of tokens that are not among the largest.
        if (
            count == order.size
            or before[count] / high <= top_p + ROUNDING
            or self.values[order[count - 1]] <= self.floor
        ):
            return None
        return self._ascending(order[:count])

    def min_p(self, min_p: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """Return the ids and scores of the tokens that min_p keeps; None if the largest logits do not decide which."""
        ratios = np.exp((np.append(self.values, self.floor) - self.values.max()).astype(np.float64)) / min_p
        if min_p < 1e-30 or (np.abs(ratios - 1) < ROUNDING).any() or ratios[-1] > 1:
            return None
        return self._ascending(np.flatnonzero(ratios[:-1] > 1))

    def _ascending(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        numbers = numbers[np.argsort(self.ids[numbers])]
        return self.ids[numbers], self.values[numbers]


def scores_of(top: TopLogits, values: npt.NDArray[np.float32], temperature: float) -> Scores | None:
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
    """Return bounds of the sum of x**power over all but the n largest logits, where x = exp(logit - largest logit).

    The bounds follow from the sum of x over all tokens of the vocabulary, the number of tokens, and the smallest x
    among the n largest logits.
    """
    others = top.vocabulary - top.ids.size
    x = np.exp((top.values - top.values[0]).astype(np.float64))
    least, most = (max(top.mass * (1 + sign * MASS_ERROR) - float(x.sum()), 0.0) for sign in (-1, 1))
    largest = max(float(x[-1]), 1e-300)

    def as_one(mass: float) -> float:
        """Return the sum of x**power over the logits outside the n largest, if all their x are equal and sum to `mass`.

        By Jensen's inequality the result is a lower bound for a power above 1, and an upper bound below 1.
        """
        return float(others * (mass / others) ** power)

    def as_few(mass: float) -> float:
        """Return the sum of x**power over the logits outside the n largest, if as few x as possible are above 0.

        The x add up to `mass`, and each x above 0 is then `largest`, the most that an x can be.
        """
        return float(mass * largest ** (power - 1))

    return (as_one(least), as_few(most)) if power >= 1 else (as_few(least), as_one(most))
