"""The next token from the largest logits of a row alone, where they prove it: what lets the others stay on the device
that computed them.

What a token is to be says `kvexport.runtime.sampling`; what is settled here is settled to the same bits.
`candidates.onnx` finds the candidates on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvexport.runtime.sampling import GenerationSettings

# Relative: a device adds float32 numbers in an order of its own, a thread at most some hundred one after the other
MASS_ERROR = 1e-4
ROUNDING = 1e-5  # of a probability, in sums of float32 numbers


@dataclass(frozen=True)
class Candidates:
    """The largest logits of a row of `vocabulary`. ids, values: [n], the values descending; every other logit is at
    most the last of them.
    mass: sum of exp(logit - largest logit) over the whole row, within MASS_ERROR."""

    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    mass: float
    vocabulary: int


class Rows(Protocol):
    """What a decode step gave every lane, until the next step."""

    def candidates(self, lane: int) -> Candidates | None:
        """The largest logits; None where the whole row is in the host's memory already."""
        ...

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """All logits [vocabulary], copied to the host where they are not there."""
        ...


@dataclass(frozen=True)
class HostRows:
    """Logits [lanes, vocabulary] in the host's memory."""

    logits: npt.NDArray[np.float32]

    def candidates(self, lane: int) -> None:
        """None: there is nothing to save."""

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """See `Rows.row`."""
        row: npt.NDArray[np.float32] = self.logits[lane]
        return row


@dataclass(frozen=True)
class Scores:
    """Candidates after everything that changes logits. ids, values: [n] int64, float32. floor: no other token of the
    row is above it.
    rest: between what bounds the sum of exp(score - largest score) over the other tokens lies."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    floor: np.float32
    rest: tuple[float, float]

    def top_k(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """The tokens not below the k-th largest; None where that may be no candidate, or level with others that are
        none."""
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


def may_settle(settings: GenerationSettings, count: int, vocabulary: int) -> bool:
    """Whether `count` candidates can ever be enough. A penalty below 1 raises tokens that are none; without top_k,
    top_p and min_p every token of the vocabulary may be drawn."""
    if count >= vocabulary:
        return True
    narrows = 0 < settings.top_k < count or settings.top_p < 1 or settings.min_p > 0
    return settings.repetition_penalty >= 1 and (narrows or not settings.do_sample)


def scores_of(candidates: Candidates, values: npt.NDArray[np.float32], temperature: float) -> Scores | None:
    """Candidates whose logits became `values`, none of them higher than before (nor would those of other tokens be),
    over the
    temperature. None where the row cannot be sampled from: the whole of it will say why."""
    ids, floor = candidates.ids.astype(np.int64), candidates.values[-1:]
    if not (math.isfinite(candidates.mass) and math.isfinite(candidates.values[0])):
        return None
    if temperature != 1.0:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scaled, floor = values / temperature, floor / temperature
    else:
        scaled = values
    if not math.isfinite(scaled.max()):
        return None
    lowered = values is not candidates.values
    low, high = _rest(candidates, 1 / temperature)
    fallen = float(candidates.values[0]) / temperature - float(
        scaled.max()
    )  # from the largest logit to the largest score
    if fallen > 500:
        return None
    rebase = math.exp(fallen)
    return Scores(ids, scaled, floor[0], (0.0 if lowered else low * rebase, high * rebase))


def _rest(candidates: Candidates, power: float) -> tuple[float, float]:
    """Bounds of the sum of x**power over the tokens that are no candidates, x = exp(logit - largest): what is known is
    the sum of x, that each is at most the last candidate's, and how many there are."""
    others = candidates.vocabulary - candidates.ids.size
    x = np.exp((candidates.values - candidates.values[0]).astype(np.float64))
    least, most = (max(candidates.mass * (1 + sign * MASS_ERROR) - float(x.sum()), 0.0) for sign in (-1, 1))
    largest = max(float(x[-1]), 1e-300)

    def as_one(mass: float) -> float:
        """Were they all alike: the least sum for a power above 1, the most for one below (Jensen)."""
        return float(others * (mass / others) ** power)

    def as_few(mass: float) -> float:
        """Were they all as large as they may be."""
        return float(mass * largest ** (power - 1))

    return (as_one(least), as_few(most)) if power >= 1 else (as_few(least), as_one(most))
