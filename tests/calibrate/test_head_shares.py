"""Shares of the budget by what the evictions of each KV head cost a text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvexport.allocation import allocate
from kvexport.calibrate.head_shares import asked_and_answered, calibrate_heads, cheapest, measured_budgets
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.evaluate.recall import Passage, Question
from kvexport.recipe.load import load_recipe
from tests.support.recipes import method_settings, set_options

SIZES = [*method_settings("ballot"), "cache.budget=32", "limits.max_length=256"]


def test_the_verb_gives_the_heads_that_a_text_needs_their_shares() -> None:
    asked = ["calibrate", "--of", "heads", "--recipe", "tiny-base", "--passages", "1", "--json"]
    ran = CliRunner().invoke(app, [*asked, *set_options(SIZES)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert (found["length"], found["budgets"]) == (256, [16, 32, 64, 128, 144])
    costs = np.array(found["costs"]["text"])
    assert costs.shape == (2, 2, 5) and (costs >= 0).all()
    # Facts are found by the second layer alone, the less often the fewer slots it has.
    assert costs[1, :, 0].sum() > 5 * costs[0, :, 0].sum() and costs[1, :, 0].sum() > 1.2 * costs[1, :, -1].sum()
    settings = [*SIZES, "cache.allocation.kind=listed", found["setting"]]
    slots = allocate(load_recipe("tiny-base", settings).recipe, 2)
    assert sum(slots) == 4 * 32 and min(slots[2:]) > max(slots[:2])


def test_answers_count_beside_texts() -> None:
    settings = [*SIZES, "export.prefill_chunk=32"]
    alone, both = (calibrate_heads("tiny-base", settings, passages=1, tasks=x) for x in (["text"], ["text", "recall"]))
    assert list(both.costs) == ["text", "recall"] and both.costs["text"] == alone.costs["text"]
    asked = np.array(both.costs["recall"])
    assert asked.shape == (2, 2, 5) and asked[1, :, 0].sum() > 5 * asked[0, :, 0].sum()
    assert both.shares != alone.shares


def test_an_answer_is_judged_where_the_token_before_it_stands() -> None:
    given = Passage([1, 2, 3], [Question([4, 5], [6, 7], 2), Question([8], [9], 1)])
    sample = asked_and_answered(given)
    assert [sample.ids[p + 1] for p in sample.counted] == [6, 7, 9] and sample.ids[:3] == given.ids


@pytest.mark.parametrize("of", ["heads", "text"])
def test_a_task_that_there_is_not_is_refused_by_name(of: str) -> None:
    ran = CliRunner().invoke(app, ["calibrate", "--of", of, "--recipe", "tiny-base", "--tasks", "sums"])
    assert ran.exit_code == 2
    assert ("there is no task 'sums'" if of == "heads" else "--tasks is of --of heads") in ran.stderr


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
        calibrate_heads("tiny-base", [*method_settings("ballot"), *settings], length=256)


def test_the_budgets_that_are_measured_stand_around_the_recipes_share_of_the_text() -> None:
    recipe = load_recipe("smollm2-135m-base", ["cache.method=ballot"]).recipe
    assert measured_budgets(recipe, 1024) == [32, 64, 128, 256, 512]
