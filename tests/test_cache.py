"""How layers share the budget."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvexport.cache import allocate
from kvexport.recipe.fields import Recipe


def budgets(layers: int, method: str = "h2o", **allocation: Any) -> list[int]:
    cache = {"method": method, "budget": 100, "allocation": allocation}
    return allocate(Recipe.model_validate({"model": {"path": "-"}, "cache": cache}), layers)


@pytest.mark.parametrize("layers", [1, 2, 7, 32])
@pytest.mark.parametrize("kind", ["cosine", "pyramid"])
def test_the_total_is_that_of_uniform_budgets_and_none_grows_with_depth(kind: str, layers: int) -> None:
    shares = budgets(layers, kind=kind, minimum=0.25)
    assert sum(shares) == 100 * layers
    assert all(a >= b - 1 for a, b in itertools.pairwise(shares))  # rounding


def test_a_pyramid_falls_linearly_to_its_minimum() -> None:
    assert budgets(5, kind="pyramid", minimum=0.25) == [160, 130, 100, 70, 40]
    assert budgets(1, kind="pyramid", minimum=0.25) == [100]


def test_a_method_brings_its_own_allocation_unless_the_recipe_says() -> None:
    assert budgets(5, "pyramidkv") == budgets(5, kind="pyramid") != [100] * 5
    assert budgets(5, "pyramidinfer") == budgets(5, kind="cosine") != [100] * 5
    assert budgets(5, "pyramidkv", kind="uniform") == budgets(5, "snapkv") == [100] * 5
