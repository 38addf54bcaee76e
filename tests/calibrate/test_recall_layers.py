"""Tests of calibrating the layers on which recall depends, and of the ones that a recipe's budget can keep whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvexport.cache import LayerGeometry
from kvexport.cache_planning import plan_cache
from kvexport.calibrate.recall_layers import Calibration, calibrate, whole_layers
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.evaluate.statistics import Estimate
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe

TINY = ["cache.budget=160", "limits.max_length=256"]


def recipe_of(*settings: str) -> Recipe:
    return load_recipe("tiny-base", ["cache.method=h2o", *settings]).recipe


def geometry(layers: int) -> list[LayerGeometry]:
    return [LayerGeometry(2, 2, 16, 16)] * layers


def test_the_command_names_the_layer_that_answers_and_the_setting_that_keeps_it_whole() -> None:
    settings = [part for setting in [*TINY, "cache.parameters.threshold=0.7"] for part in ("--set", setting)]
    ran = CliRunner().invoke(app, ["calibrate", "--recipe", "tiny-keepkv", *settings, "--passages", "2", "--json"])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert (result["exact"]["value"], result["exact"]["count"]) == (1.0, 12)
    costs = [layer["value"] for layer in result["layers"]]
    assert result["length"] == 192 and len(costs) == 2
    assert int(np.argmax(costs)) == 1 and costs[1] > 1.0
    assert result["setting"] == "cache.allocation.whole=[1]"
    plan = plan_cache(recipe_of(*TINY, result["setting"]), geometry(2))
    assert [(layer.merges, {*layer.budget}) for layer in plan.caches] == [(True, {64}), (False, {256})]


def test_the_report_has_the_line_for_the_recipe_or_a_reason() -> None:
    cost = [Estimate(0.01, 0.0, 0.02, 6), Estimate(0.5, 0.4, 0.6, 6)]
    assert "whole: [1]" in str(Calibration("r", 100, Estimate(0.9, 0.8, 1.0, 6), cost, [1]).sections())
    assert "no layer costs enough" in str(Calibration("r", 100, Estimate(0.9, 0.8, 1.0, 6), cost, []).sections())
    assert "answers nothing" in str(Calibration("r", 100, Estimate(0.0, 0.0, 0.3, 6), cost, []).sections())


def test_whole_layers_are_the_dearest_that_matter_and_that_the_budget_has_slots_for() -> None:
    cost = [0.0, 0.9, 0.02, 0.3, -0.1, 0.2, 0.0, 0.1, 0.0, 0.0]
    sizes = ["limits.max_length=1000", "cache.sinks=4", "cache.recent=0.5"]
    shapes = geometry(len(cost))
    expected = {0.9: [1, 3, 5, 7], 0.5: [1, 3, 5], 0.34: [1, 3], 0.125: [1]}
    for budget, layers in expected.items():
        recipe = recipe_of(*sizes, f"cache.budget={budget}")
        assert whole_layers(cost, recipe, shapes) == layers
        plan_cache(recipe_of(*sizes, f"cache.budget={budget}", f"cache.allocation.whole={layers}"), shapes)
    assert whole_layers([0.0, -0.1], recipe_of(*sizes, "cache.budget=0.9"), geometry(2)) == []
    # A fixed recent window of 300 slots leaves too little for the other nine layers.
    crowded = recipe_of("limits.max_length=1000", "cache.sinks=4", "cache.recent=300", "cache.budget=340")
    assert whole_layers(cost, crowded, shapes) == []


@pytest.mark.parametrize(
    ("settings", "problem", "fix"),
    [
        (["cache.method=full"], "evicts nothing", "cache.budget=0.34"),
        (["cache.budget=64"], "no layer of this recipe can be whole", "--set cache.budget="),
        ([*TINY, "cache.positions=cache"], "no layer of this recipe can be whole", "cache.positions=absolute"),
    ],
)
def test_a_recipe_in_which_no_layer_can_be_whole_is_refused_before_anything_is_built(
    settings: list[str], problem: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvexport.export.build.build", None)
    with pytest.raises(UsageError, match=problem) as error:
        calibrate("tiny-base", ["cache.method=h2o", *settings])
    assert fix in error.value.fix


def test_a_checkpoint_without_a_tokenizer_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tiny_checkpoint / file, tmp_path)
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        calibrate(
            "tiny-base", ["cache.method=h2o", f"model.path={tmp_path}", "cache.budget=0.6", "limits.max_length=256"]
        )


def test_a_text_that_is_too_short_is_refused_with_a_fix(tiny_recipe: Path, tmp_path: Path) -> None:
    settings = ["--set", "cache.budget=0.6"]
    (tmp_path / "short.txt").write_text("a bird. ")
    short = ["--recipe", str(tiny_recipe), *settings, "--length", "1000", "--text", str(tmp_path / "short.txt")]
    ran = CliRunner().invoke(app, ["calibrate", *short])
    assert ran.exit_code == 2
    assert "--text FILE with more text" in ran.stderr
    ran = CliRunner().invoke(app, ["calibrate", "--recipe", str(tiny_recipe), "--text", str(tmp_path / "none")])
    assert ran.exit_code == 2 and "cannot be read as text" in ran.stderr
