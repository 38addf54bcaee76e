"""The division of a KV-cache budget among KV heads or layers so that evictions raise the model's loss least."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

STEPS = (0.0, 0.25, 0.5, 0.75)  # candidates for the shrinkage factor: the part of a budget that is divided equally
NOTHING = 1e-12  # nats; a smaller cost counts as this one


def robust_budgets(
    costs: Mapping[str, NDArray[np.float64]],
    budgets: Sequence[int] | NDArray[np.int64],
    most: int | NDArray[np.int64],
    slots: int,
    least: int,
) -> tuple[NDArray[np.int64], float]:
    """Return budgets in cache slots, [n], that lower the loss by evictions on all kinds of text, and a shrinkage.

    The budgets minimize the sum of relative costs: for each kind of text, the cost divided by that with equal budgets.
    The budgets are then moved towards equal budgets: the shrinkage is the fraction of the slots that is divided
    equally. It is chosen by leaving out each kind of text in turn: the fraction with the smallest cost on the worst
    left-out kind is taken.
    """
    curves = {kind: curves_of(cost, budgets, least, most) for kind, cost in costs.items()}
    equal = {kind: max(curve[:, slots - least].sum(), NOTHING) for kind, curve in curves.items()}
    most = np.broadcast_to(most, len(next(iter(curves.values()))))
    relative = {kind: curve / equal[kind] for kind, curve in curves.items()}
    shrink = 0.0
    if len(costs) > 1:
        worst = dict.fromkeys(STEPS, 0.0)
        total = np.sum(list(relative.values()), 0)
        for curve, step in product(relative.values(), STEPS):
            allotted = shrunk(cheapest(total - curve, slots, least, most), slots, step, most)
            worst[step] = max(worst[step], float(curve[np.arange(len(allotted)), allotted - least].sum()))
        shrink = min(STEPS, key=lambda step: worst[step])
    budgets = cheapest(np.sum(list(relative.values()), 0), slots, least, most)
    return shrunk(budgets, slots, shrink, most), shrink


def relative_cost(
    cost: NDArray[np.float64],
    budgets: Sequence[int] | NDArray[np.int64],
    most: int | NDArray[np.int64],
    allotted: NDArray[np.int64],
    slots: int,
    least: int,
) -> float:
    curve = curves_of(cost, budgets, least, most)
    at = np.clip(allotted, least, most) - least
    return float(curve[np.arange(len(at)), at].sum() / max(curve[:, slots - least].sum(), NOTHING))


def curves_of(
    cost: NDArray[np.float64], budgets: Sequence[int] | NDArray[np.int64], least: int, most: int | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the loss by evictions [n, slots] of n KV heads or layers, for each number of slots from `least` on.

    Between the measured budgets, the logarithm of the loss is interpolated linearly in the logarithm of the slots;
    beyond these budgets it is extrapolated. A head or layer with at least `most` slots evicts nothing: its loss is 0.
    """
    slots = np.arange(least, np.max(most) + 1)
    x = np.broadcast_to(np.log(budgets), cost.shape)
    y = np.log(np.maximum(np.minimum.accumulate(cost, -1), NOTHING))
    slope = (y[:, 1:] - y[:, :-1]) / (x[:, 1:] - x[:, :-1])
    curve = np.zeros((len(cost), len(slots)))
    for row, bound in enumerate(np.broadcast_to(most, len(cost))):
        piece = np.clip(np.searchsorted(x[row], np.log(slots)) - 1, 0, x.shape[1] - 2)
        curve[row] = np.exp(y[row, piece] + slope[row, piece] * (np.log(slots) - x[row, piece]))
        curve[row, max(int(bound) - least, 0) :] = 0.0
    return curve


def cheapest(
    curve: NDArray[np.float64], slots: int, least: int, most: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the budgets [n], with the mean `slots`, that minimize the total loss by evictions."""
    counts, total = least + np.arange(curve.shape[1]), slots * len(curve)
    most = np.full(len(curve), counts[-1]) if most is None else most
    low, high = -40.0, 10.0
    for _ in range(100):
        price = (low + high) / 2
        enough = counts[(curve + np.exp(price) * counts).argmin(-1)].sum() >= total
        low, high = (price, high) if enough else (low, price)
    budgets: NDArray[np.int64] = counts[(curve + np.exp(high) * counts).argmin(-1)].astype(np.int64)
    return _summing_to(budgets, total, least, most)


def shrunk(
    budgets: NDArray[np.int64], slots: int, step: float, most: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return budgets with the same mean, of which the fraction `step` is divided equally."""
    mixed = np.floor((1 - step) * budgets + step * slots).astype(np.int64)
    most = np.full(len(mixed), max(budgets)) if most is None else np.minimum(most, max(budgets))
    return _summing_to(np.minimum(mixed, most), slots * len(mixed), int(min(budgets)), most)


def _summing_to(budgets: NDArray[np.int64], total: int, least: int, most: NDArray[np.int64]) -> NDArray[np.int64]:
    budgets, rest = budgets.copy(), total - int(budgets.sum())
    while rest:
        free = np.flatnonzero(budgets < most if rest > 0 else budgets > least)
        if not len(free):
            break
        budgets[free[: abs(rest)]] += np.sign(rest)
        rest = total - int(budgets.sum())
    return budgets
