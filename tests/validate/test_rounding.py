"""Tests of rounding errors against float64: chance in a small sample fails no right engine, but larger errors do."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvexport.validate.result import Rounding, ValidationResult, level_of, quantiles_of

DRAWS = 200


def rounding(engine: NDArray[np.float64], pytorch: NDArray[np.float64]) -> Rounding:
    return Rounding("decode", "key", len(engine), quantiles_of(engine), quantiles_of(pytorch), 1e-12)


def refused(count: int, factor: float) -> tuple[float, float]:
    """Return the share of draws in which errors `factor` times PyTorch's are refused."""
    rng = np.random.default_rng(count)
    refusals, alone = 0, 0
    for _ in range(DRAWS):
        engine, pytorch = np.exp(rng.standard_normal((2, count))) * 1e-6
        refusals += not rounding(factor * engine, pytorch).holds
        alone += quantiles_of(factor * engine).p99 > 3 * quantiles_of(pytorch).p99
    return refusals / DRAWS, alone / DRAWS


@pytest.mark.parametrize("count", [36, 100, 800, 2000])
def test_equal_errors_pass_and_six_times_larger_ones_fail_more_often_than_by_the_99th_percentile(count: int) -> None:
    assert refused(count, 1.0)[0] == 0.0
    refusals, alone = refused(count, 6.0)
    assert refusals >= max(alone, 0.95)


def test_a_few_errors_out_of_bounds_fail_where_they_are_far_out() -> None:
    alike = np.linspace(1e-7, 1e-6, 36)
    few = np.where(np.arange(36) >= 34, alike * 3.16, alike)
    assert rounding(few, alike).holds  # two of 36 errors, as observed with a sound engine
    assert not rounding(np.where(np.arange(36) >= 34, alike * 100, alike), alike).holds
    assert not rounding(np.where(np.arange(36) >= 20, alike * 3.5, alike), alike).holds


def test_from_a_thousand_errors_on_it_is_the_99th_percentile() -> None:
    assert [level_of(n) for n in (0, 9, 20, 100, 1000, 10**6)] == [0.5, 0.5, 0.5, 0.9, 0.99, 0.99]
    many = np.linspace(1e-7, 1e-6, 2000)
    assert rounding(np.where(np.arange(2000) >= 1985, many * 50, many), many).holds
    assert not rounding(np.where(np.arange(2000) >= 1970, many * 3.1, many), many).holds


def test_the_problem_has_the_number_of_errors_and_the_bound() -> None:
    alike = np.linspace(1e-7, 1e-6, 36)
    result = ValidationResult("a", "r", "b", [8], ["text"], [4], {}, {}, rounding=[rounding(alike * 4, alike)])
    assert "keys (decode, 36 vectors) against float64 exceed PyTorch's: 72% quantile" in result.problem
    assert quantiles_of(np.zeros(0)).p99 == 0.0
