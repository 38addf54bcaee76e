"""The distribution of a sequence's next token: the tokens that temperature, top_k, top_p and min_p keep.

The kept tokens and their probabilities are equal to those of transformers 5.23. The input is a whole row of logits, or
only the n largest logits of a row, if they alone determine the next token: all other logits then stay on the device
that computed them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvexport.backends.rows import MASS_ERROR, TopLogits
from kvexport.errors import KvexportError
from kvexport.language.settings import GenerationSettings

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 512
_SORTED_AT_ONCE = 256
ROUNDING = 1e-5  # of a probability, in sums of float32 numbers


class Logprobs(NamedTuple):
    """Log probabilities of the token that one decode step chose, and of the likeliest tokens."""

    chosen: float  # log probability of the chosen token
    # Likeliest tokens and their log probabilities, descending. Among equal tokens the lowest id is first.
    top: tuple[tuple[int, float], ...]


def logprobs_of(logits: Floats, token: int, count: int) -> Logprobs:
    check_maximum(logits, 0)
    largest = float(logits.max())
    log_sum = largest + math.log(float(np.exp(logits - np.float32(largest)).sum(dtype=np.float64)))
    ids = _top_ids(logits, count) if 0 < count < logits.size else np.arange(min(count, logits.size))
    order = ids[np.lexsort((ids, -logits[ids]))][:count]
    return Logprobs(float(logits[token]) - log_sum, tuple((int(i), float(logits[i]) - log_sum) for i in order))


def distribution_of(scores: Floats, settings: GenerationSettings, step: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Return the tokens that temperature, top_k, top_p and min_p keep, in transformers' order, with probabilities."""
    if settings.temperature != 1.0:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scores = scores / settings.temperature
        check_maximum(scores, step, f" after division by the temperature {settings.temperature}")
    k = settings.top_k
    ids = _top_ids(scores, k) if 0 < k < scores.size else np.flatnonzero(scores > -np.inf)
    values = scores[ids]
    return _narrowed(ids, values, settings.top_p, settings.min_p)


def _narrowed(ids: Ids, values: Floats, top_p: float, min_p: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    if top_p < 1.0:
        kept = _top_p_indices(values, top_p)
        ids, values = ids[kept], values[kept]
    if min_p > 0.0:
        probabilities = _softmax(values)
        kept = np.flatnonzero(probabilities >= min_p * probabilities.max())
        ids, values = ids[kept], values[kept]
    weights = np.exp(values - values.max()).astype(np.float64)
    return ids, weights / weights.sum()


@dataclass(frozen=True)
class Scores:
    """The n largest scores of a vocabulary row (logits after temperature and penalties), with bounds on all others."""

    ids: Ids  # token ids [n] int64
    values: Floats
    floor: np.float32  # no other token of the row has a higher score
    rest: tuple[float, float]  # bounds of the sum of exp(score - largest score) over the other tokens

    def top_k(self, k: int) -> tuple[Ids, Floats] | None:
        """Return the ids and scores of the `k` tokens of highest score; None if other tokens could be among them."""
        above = self.values > self.floor
        if above.sum() < k:
            return None
        kept = np.flatnonzero(self.values >= np.partition(self.values, -k)[-k])
        return self._ascending(kept)

    def top_p(self, top_p: float) -> tuple[Ids, Floats] | None:
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

    def min_p(self, min_p: float) -> tuple[Ids, Floats] | None:
        """Return the ids and scores of the tokens that min_p keeps; None if the largest logits do not decide which."""
        ratios = np.exp((np.append(self.values, self.floor) - self.values.max()).astype(np.float64)) / min_p
        if min_p < 1e-30 or (np.abs(ratios - 1) < ROUNDING).any() or ratios[-1] > 1:
            return None
        return self._ascending(np.flatnonzero(ratios[:-1] > 1))

    def _ascending(self, numbers: Ids) -> tuple[Ids, Floats]:
        numbers = numbers[np.argsort(self.ids[numbers])]
        return self.ids[numbers], self.values[numbers]


def scores_of(top: TopLogits, values: Floats, temperature: float) -> Scores | None:
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
    """Return bounds of the sum of x**power over all logits but the n largest, where x = exp(logit - largest logit).

    The bounds follow from the sum of x over all tokens of the vocabulary, the number of tokens, and the smallest x
    among the n largest logits.
    """
    others = top.vocabulary - top.ids.size
    x = np.exp((top.values - top.values[0]).astype(np.float64))
    least, most = (max(top.mass * (1 + sign * MASS_ERROR) - float(x.sum()), 0.0) for sign in (-1, 1))
    largest = max(float(x[-1]), 1e-300)

    def as_one(mass: float) -> float:
        """Return the sum of x**power if all x are equal: a lower bound if power > 1, otherwise an upper one."""
        return float(others * (mass / others) ** power)

    def as_few(mass: float) -> float:
        """Return the sum of x**power if as few x as possible are above 0, each of them equal to `largest`."""
        return float(mass * largest ** (power - 1))

    return (as_one(least), as_few(most)) if power >= 1 else (as_few(least), as_one(most))


def distribution_of_top(
    scores: Scores, settings: GenerationSettings, vocabulary: int
) -> tuple[Ids, npt.NDArray[np.float64]] | None:
    """Return the tokens that could be sampled and their probabilities, from the largest logits of a row.

    The result is None if the largest logits do not determine it. The largest logits must suffice for the first of the
    filters top_k, top_p and min_p that is set. The later filters only get the tokens that the first filter kept.
    """
    top_p, min_p = settings.top_p, settings.min_p
    if 0 < settings.top_k < vocabulary:
        kept = scores.top_k(settings.top_k)
    elif top_p < 1.0:
        kept, top_p = scores.top_p(top_p), 1.0
    elif min_p > 0.0:
        kept, min_p = scores.min_p(min_p), 0.0
    else:
        return None
    return None if kept is None else _narrowed(*kept, top_p, min_p)


def _top_ids(scores: Floats, k: int) -> Ids:
    """Return the ids of all tokens with a finite score not below the k-th largest (with ties more than k)."""
    # The k-th largest of the blocks' maxima is at most the k-th largest score, and finding it reads each score once. A
    # few times k scores pass this bound. A partition of the whole vocabulary would cost ten times as much.
    width = min(_BLOCK, scores.size // (4 * k))
    ids = np.arange(scores.size)
    if width > 4:
        maxima = scores[: scores.size // width * width].reshape(-1, width).max(axis=1)
        ids = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    values = scores[ids]
    kept: Ids = ids[(values >= np.partition(values, -k)[-k]) & (values > -np.inf)]
    return kept


def _top_p_indices(values: Floats, top_p: float) -> Ids:
    """Return the ascending indices of the finite scores `values` [n] that nucleus sampling (top_p) keeps.

    Starting from the smallest, values are dropped while their total probability is within 1 - top_p. Among equal values
    the higher indices are kept; in transformers the order depends on torch.sort, which is not stable.
    """
    probabilities, bound = _softmax(values), np.float32(1.0 - top_p)
    stays = np.zeros(values.size, dtype=bool)
    undecided, fallen = np.arange(values.size), 0.0
    # A quickselect by mass: each round decides the values above or below a pivot, so that only the values at the
    # boundary are sorted.
    while undecided.size > _SORTED_AT_ONCE:
        rest = values[undecided]
        pivot = np.median(rest[:: rest.size // 64])
        is_low = rest < pivot
        if not is_low.any():
            break
        # Indices from flatnonzero cost a fifth of indexing with an unpredictable mask.
        low, high = undecided[np.flatnonzero(is_low)], undecided[np.flatnonzero(~is_low)]
        mass = float(probabilities[low].sum(dtype=np.float64))
        if np.float32(fallen + mass) <= bound:
            undecided, fallen = high, fallen + mass
        else:
            undecided = low
            stays[high] = True
    order = undecided[np.argsort(values[undecided], kind="stable")]
    # torch.cumsum adds float32 in double, rounds every sum to float32 and compares with the bound as float32.
    cumulative = (fallen + np.cumsum(probabilities[order], dtype=np.float64)).astype(np.float32)
    stays[order[cumulative > bound]] = True
    if not stays.any():
        stays[order[-1]] = True
    return np.flatnonzero(stays)


def _softmax(values: Floats) -> Floats:
    weights = np.exp(values - values.max())
    return np.asarray(weights / np.float32(weights.sum(dtype=np.float64)), dtype=np.float32)


def draw(probabilities: npt.NDArray[np.float64], uniform: float) -> int:
    """Return the index of positive probability that a uniform number in [0, 1) selects (inverse transform sampling)."""
    cumulative = np.cumsum(probabilities)
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), last)


def check_maximum(scores: Floats, step: int, where: str = "") -> None:
    # argmax stops at the first NaN, so the maximum alone tells NaN, +inf and "all -inf" apart from a usable row.
    best = int(scores.argmax())
    value = float(scores[best])
    if math.isfinite(value):
        return
    if value == -math.inf:
        raise KvexportError(
            f"every logit of new token {step} is -inf{where}: no token is possible",
            "lower min_new_tokens, the penalty or the bias, or give a grammar that allows more",
        )
    fix = "run `kvexport validate` on the artifact" if not where else "raise the temperature"
    raise KvexportError(
        f"logit {best} of new token {step} is {value}{where}",
        f"{fix}; a float16 model that overflows needs dtype float32",
    )
