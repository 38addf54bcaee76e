"""Comparisons of a backend's outputs with those of the oracle."""

from collections.abc import Callable

import numpy as np

from kvexport.methods.slots import Statistic
from kvexport.schema.state import STATE_NAMES as STATE

Arrays = dict[str, np.ndarray]
# The log_ema of a slot that no query has seen: backends store a very low finite number, the oracle minus infinity.
LOG_NOTHING = -1e29


def state_of(outputs: Arrays) -> Arrays:
    """Return the state tensors among an operator's outputs: the five, and those of a method."""
    return {name.removeprefix("present_"): x for name, x in outputs.items() if name.startswith("present_")}


def by_position(state: Arrays, b: int, h: int) -> Arrays:
    """Return the used slots of one head in order of position. The score is [K, slots]."""
    used = int((state["votes"][b, h] > 0).sum())
    assert (state["votes"][b, h, :used] > 0).all(), "used slots are no prefix"
    assert (state["votes"][b, h, used:] == 0).all()
    order = np.argsort(state["position"][b, h, :used])
    return {
        name: state[name][b, h][..., order, :] if name in ("key", "value") else state[name][b, h][..., order]
        for name in STATE
    }


def assert_finite(outputs: Arrays) -> None:
    for name, x in outputs.items():
        assert np.isfinite(x).all(), f"{name} has NaN or infinity"


def assert_near(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Assert that |actual - expected| <= tolerance * max(1, max |expected|)."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if expected.size:
        error = np.abs(actual.astype(np.float64) - expected).max()
        bound = tolerance * max(1.0, np.abs(expected).max())
        assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g}"


def assert_near_each(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Assert that |actual - expected| <= tolerance * |expected| for each element."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    error = np.abs(actual.astype(np.float64) - expected)
    worst = error - tolerance * np.abs(expected) - 1e-30
    assert (worst <= 0).all(), (
        f"{what}: {actual.ravel()[worst.argmax()]:.8g} where {expected.ravel()[worst.argmax()]:.8g} is right"
    )


def assert_scores(
    actual: np.ndarray, expected: np.ndarray, statistics: tuple[Statistic, ...], tolerance: float, what: str
) -> None:
    """Assert that two scores [K, slots] are equal within the tolerance."""
    for k, statistic in enumerate(statistics):
        if statistic.kind == "probability":
            assert_near_each(actual[k], expected[k], tolerance, f"{what} {k}")
        else:
            nothing = expected[k] < LOG_NOTHING
            assert (actual[k][nothing] < LOG_NOTHING).all(), f"{what} {k}: a slot that no query saw has a score"
            assert_near(actual[k][~nothing], expected[k][~nothing], tolerance, f"{what} {k}")


def assert_same_cache(
    actual: Arrays, expected: Arrays, statistics: tuple[Statistic, ...], *, single: float, stored: float, what: str = ""
) -> None:
    """Assert that both caches have the same slots in any order: equal positions, contents within the tolerances."""
    batch, heads, _ = expected["votes"].shape
    for b in range(batch):
        for h in range(heads):
            where = f"{what} sequence {b}, head {h}:"
            a, e = by_position(actual, b, h), by_position(expected, b, h)
            assert a["position"].tolist() == e["position"].tolist(), f"{where} other slots remain"
            assert_near_each(a["votes"], e["votes"], single, f"{where} votes")
            assert_scores(a["score"], e["score"], statistics, single, f"{where} score")
            assert_near(a["key"], e["key"], stored, f"{where} key")
            assert_near(a["value"], e["value"], stored, f"{where} value")


def assert_same_rows(actual: Arrays, expected: Arrays, what: str = "") -> None:
    """Assert that both caches have their used slots in the same rows."""
    for b, h in np.ndindex(*expected["votes"].shape[:2]):
        used = int((expected["votes"][b, h] > 0).sum())
        rows = [state["position"][b, h, :used].tolist() for state in (actual, expected)]
        assert rows[0] == rows[1], f"{what} sequence {b}, head {h}: slots are in other rows"


def in_order(state: Arrays) -> Arrays:
    """Return the same caches with the used slots of every head in order of position."""
    return _reordered(state, lambda position: np.argsort(position, kind="stable"))


def permuted(state: Arrays, seed: int) -> Arrays:
    """Return the same caches with the used slots of every head in another order."""
    rng = np.random.default_rng(seed)
    return _reordered(state, lambda position: rng.permutation(len(position)))


def _reordered(state: Arrays, order_of: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    """Return the state with the used slots of each head in the order that `order_of` returns for their positions."""
    result = {name: x.copy() for name, x in state.items()}
    for b, h in np.ndindex(*state["votes"].shape[:2]):
        used = int((state["votes"][b, h] > 0).sum())
        order = order_of(state["position"][b, h, :used])
        for name in STATE:
            if name == "score":
                result[name][b, h, :, :used] = state[name][b, h][:, order]
            else:
                result[name][b, h, :used] = state[name][b, h][order]
    return result
