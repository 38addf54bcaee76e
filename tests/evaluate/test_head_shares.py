"""Shares of the budget by what the evictions of each KV head cost a text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvexport.allocation import allocate
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.evaluate.head_shares import calibrate_heads, cheapest, measured_budgets
from kvexport.recipe.load import load_recipe

SIZES = ["cache.budget=32", "limits.max_length=256"]


def test_the_verb_gives_the_heads_that_a_text_needs_their_shares() -> None:
    asked = ["calibrate", "--of", "heads", "--recipe", "tiny-ballot", "--passages", "1", "--json"]
    ran = CliRunner().invoke(app, [*asked, *(x for size in SIZES for x in ("--set", size))])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert (found["length"], found["budgets"]) == (256, [16, 32, 64, 128, 144])
    costs = np.array(found["costs"])
    assert costs.shape == (2, 2, 5) and (costs >= 0).all()
    # Facts are found by the second layer alone, the less often the fewer slots it has.
    assert costs[1, :, 0].sum() > 5 * costs[0, :, 0].sum() and costs[1, :, 0].sum() > 1.2 * costs[1, :, -1].sum()
    settings = [*SIZES, "cache.allocation.kind=listed", found["setting"]]
    slots = allocate(load_recipe("tiny-ballot", settings).recipe, 2)
    assert sum(slots) == 4 * 32 and min(slots[2:]) > max(slots[:2])


def test_budgets_of_least_cost_are_as_many_slots_and_more_where_evictions_cost_more() -> None:
    budgets = (24, 48, 96, 192)
    cost = np.stack([weight / np.array(budgets, float) for weight in (1, 4, 16)])
    slots = cheapest(cost, budgets, 300, 12, 1024)
    assert slots.sum() == 300
    np.testing.assert_allclose(slots, [300 / 7, 600 / 7, 1200 / 7], atol=2)  # as the square roots of the costs


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["cache.method=full"], "evicts nothing"),
        (["cache.budget=16", "limits.max_length=1024"], "16 slots of 1024 positions are 4 of a text of 256 tokens"),
        (["cache.positions=cache"], "all layers hold the same number"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        calibrate_heads("tiny-ballot", settings, length=256)


def test_the_budgets_that_are_measured_stand_around_the_recipes_share_of_the_text() -> None:
    recipe = load_recipe("smollm2-135m-ballot").recipe
    assert measured_budgets(recipe, 1024) == [32, 64, 128, 256, 512]
