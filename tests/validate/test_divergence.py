"""Tests of the comparison of a compressed engine's predictions with the full cache's."""

import numpy as np
import pytest

from kvexport.validate.divergence import measure_divergence
from kvexport.validate.result import ValidationResult
from kvexport.validate.sections import summary


@pytest.mark.parametrize(("sure", "far"), [(0.0, True), (4.0, False), (6.0, False)])
def test_an_engine_that_predicts_text_much_worse_than_the_full_cache_is_warned_of(sure: float, far: bool) -> None:
    """The full cache gives the next token a logit of 4 above the other four, the engine one of `sure`."""
    texts, tokens = ["text", "random"], [np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1])]
    rows = [
        [{p: size * np.eye(5)[ids[p + 1]] for p in range(3)} | {3: np.ones(5)} for ids in tokens] for size in (4, sure)
    ]
    full, own = ([{p: x.astype(np.float32) for p, x in of.items()} for of in side] for side in rows)
    result = ValidationResult("a", "r", "b", [4, 4], texts, [2], {}, {})
    measure_divergence(result, tokens, [[1, 2, 3], [3]], own, full)
    expected = [float(np.log(1 + 4 * np.exp(-x))) for x in (4, sure)]
    assert result.losses[1] is None and result.losses_of_text == pytest.approx(expected, rel=1e-6)
    assert ("much worse than the full one" in result.warning) == far == ("warning" in summary(result))
    assert f"{expected[1]:.4g} with the engine" in summary(result)["loss of the next token, text"]
