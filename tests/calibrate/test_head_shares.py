"""Tests of shares of the budget by the costs of each KV head's evictions for a text."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvexport.calibrate import facts
from kvexport.calibrate.allotment import cheapest, curves_of, robust_budgets, shrunk
from kvexport.calibrate.head_shares import calibrate_heads, fitted_slots, head_shares_of
from kvexport.calibrate.measured import Measured, budgets_of
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.plan.budgets import allocate
from kvexport.recipe.load import load_recipe
from tests.support.recipes import method_settings, set_options

SIZES = [*method_settings("ballot"), "cache.budget=32", "limits.max_length=256"]


def test_the_command_raises_the_shares_of_the_heads_that_a_text_needs() -> None:
    arguments = ["calibrate", "--recipe", "tiny-base", "--json"]
    ran = CliRunner().invoke(app, [*arguments, *set_options(SIZES)])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert (result["length"], result["budgets"]) == (256, [9, 17, 34, 66, 128])
    costs = np.array(result["costs"]["text"])
    assert costs.shape == (2, 2, 5) and (costs >= 0).all()
    # Only the second layer finds facts, and it finds fewer with fewer slots.
    assert costs[1, :, 0].sum() > 5 * costs[0, :, 0].sum() and costs[1, :, 0].sum() > 1.2 * costs[1, :, -1].sum()
    settings = [*SIZES, "cache.allocation.kind=listed", result["setting"]]
    recall = np.array(result["costs"]["recall"])
    assert recall.shape == (2, 2, 5) and recall[1, :, 0].sum() > 5 * recall[0, :, 0].sum()
    slots = allocate(load_recipe("tiny-base", settings).recipe, 2)
    assert sum(slots) == 4 * 32 and min(slots[2:]) > max(slots[:2])


def test_a_checkpoint_without_a_tokenizer_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tiny_checkpoint / file, tmp_path)
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        calibrate_heads("tiny-base", [*SIZES, f"model.path={tmp_path}"])


def test_a_text_that_is_too_short_for_facts_is_refused_with_a_fix(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "manual", lambda: "a bird. ")
    with pytest.raises(UsageError, match="the text to insert facts into gives passages of") as caught:
        facts.fact_samples(tiny_checkpoint, 1000, 1)
    length = int(caught.value.fix.removeprefix("--length "))
    assert facts.fact_samples(tiny_checkpoint, length * 7 // 8, 1)


def test_budgets_of_least_cost_are_as_many_slots_and_more_where_evictions_cost_more() -> None:
    budgets = (24, 48, 96, 192)
    cost = np.stack([weight / np.array(budgets, float) for weight in (1, 4, 16)])
    slots = cheapest(curves_of(cost, budgets, 12, 1024), 100, 12)
    assert slots.sum() == 300
    np.testing.assert_allclose(slots, [300 / 7, 600 / 7, 1200 / 7], atol=2)  # like the square roots of the costs


def test_budgets_are_shrunk_where_kinds_of_text_disagree() -> None:
    sizes, slots = (24, 48, 96, 192), np.array((24, 48, 96, 192), float)
    one, other = (np.stack([weight / slots for weight in weights]) for weights in ((1, 1, 1, 64), (64, 1, 1, 1)))
    agreed, none = robust_budgets({"a": one, "b": one}, sizes, 1024, 100, 12)
    assert none == 0 and agreed.sum() == 400 and agreed[3] > 3 * agreed[0]
    budgets, shrink = robust_budgets({"a": one, "b": one, "c": other}, sizes, 1024, 100, 12)
    assert shrink == 0.75 and budgets.sum() == 400 and max(budgets) - min(budgets) < 100
    assert shrunk(agreed, 100, 1.0).tolist() == [100] * 4


@pytest.mark.parametrize(
    ("budget", "length", "slots"),
    [(64, 8192, 64), (200, 8192, 200), (2048, 8192, 256), (4096, 8192, 512), (300, 1024, 300), (13, 1024, 13)],
)
def test_shares_are_fitted_to_the_budget_that_is_built(budget: int, length: int, slots: int) -> None:
    settings = ["cache.method=ballot", f"cache.budget={budget}", f"limits.max_length={length}"]
    assert fitted_slots(load_recipe("smollm2-135m-base", settings).recipe, 1024) == slots


def test_shares_follow_the_costs_at_the_budget_and_windows_bound_them() -> None:
    """One head saves much with few slots, another with many; a third sees no more than a window of 64."""
    length, window = 1024, 64
    seen, budgets = [length, length, window], [budgets_of(n, 12) for n in (length, length, window)]
    few, many = (1e4 * np.array(budgets[0], float) ** -power for power in (4.0, 1.0))
    costs = np.stack([1e5 * few, many, many])[:, None]
    measured = Measured(length, budgets, seen, {"text": costs})
    at = {slots: np.array(head_shares_of(measured, slots, 12)[0])[:, 0] for slots in (32, 256)}
    assert at[32][0] > at[32][1] and at[256][1] > 2 * at[256][0]
    assert all((slots * shares[2]).round() <= window for slots, shares in at.items())
    assert at[256].sum() == pytest.approx(3, abs=0.02)


@pytest.mark.parametrize(("settings", "problem"), [
    (["cache.method=full"], "evicts nothing"),
    (["cache.budget=8", "limits.max_length=1024"], "8 slots leave no choice"),
    (["cache.positions=cache"], "all layers hold the same number"),
])  # fmt: skip
def test_impossible_measurements_are_refused(settings: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        calibrate_heads("tiny-base", [*method_settings("ballot"), *settings], length=256)


def test_the_measured_budgets_reach_from_the_least_to_half_the_text() -> None:
    assert budgets_of(1024, 12) == [32, 64, 128, 256, 512] and budgets_of(256, 12)[0] == 12
    with pytest.raises(UsageError, match="a text of 40 tokens is too short"):
        budgets_of(40, 12)


def test_kinds_of_text_come_from_the_users_folder(tmp_path: Path) -> None:
    arguments = ["calibrate", "--recipe", "tiny-base", "--texts", str(tmp_path)]
    settings = set_options(SIZES)
    assert "has no file NAME.txt or NAME.md" in CliRunner().invoke(app, [*arguments, *settings]).stderr
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    assert "cannot be read" in CliRunner().invoke(app, [*arguments, *settings]).stderr
    (tmp_path / "latin.txt").write_text("anna " * 300)
    ran = CliRunner().invoke(app, [*arguments, *settings])
    assert ran.exit_code == 0, ran.output
    assert "latin" in ran.stdout and "Cost of evictions" in ran.stdout
