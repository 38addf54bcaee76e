"""Tests of shares of the budget by the costs of each layer's evictions for a text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvexport.allocation import allocate
from kvexport.calibrate.layer_shares import LEAST, calibrate_text, shares_of, text_losses
from kvexport.commands.app import app
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.evaluate.language import Words
from kvexport.evaluate.measure import counted_logits
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.tasks import Sample
from kvexport.export.build import build
from kvexport.recipe.load import load_recipe
from tests.support.recipes import method_settings, set_options

LENGTH = 256
BALLOT = method_settings("ballot")


def engine_of(folder: Path, *settings: str) -> Engine:
    common = [f"limits.max_length={LENGTH}", "export.logits=all", "export.prefill_chunk=8", "limits.max_batch=8"]
    return load(build(load_recipe("tiny-base", [*BALLOT, *common, *settings]).recipe, folder), verify=False)


def test_a_layers_loss_is_that_of_an_engine_in_which_it_alone_is_compressed(tmp_path: Path) -> None:
    ids, counted = Words().text(np.random.default_rng(4), LENGTH)
    sample = Sample(ids, len(ids), counted, {})
    whole = engine_of(tmp_path / "whole", f"cache.budget={LENGTH}")
    alone = engine_of(tmp_path / "alone", f"cache.budget={(LENGTH + 24) // 2}", "cache.allocation.whole=[0]")
    assert [layer.budget[0] for layer in alone.plan.caches] == [LENGTH, 24]
    progress: list[int] = []
    losses = text_losses(whole, ids, counted, alone.plan.caches, progress.append)
    kept, compressed = (log_softmax(counted_logits(engine, [sample])[0]) for engine in (whole, alone))
    expected = (np.exp(kept) * (kept - compressed)).sum(-1).mean()
    assert expected > 0.5
    np.testing.assert_allclose(losses, [0.0, expected], rtol=1e-3, atol=1e-5)
    assert sum(progress) == 2


def test_the_command_raises_the_share_of_the_layer_that_a_text_needs() -> None:
    arguments = ["--recipe", "tiny-base", "--of", "text", "--length", str(LENGTH), "--passages", "2", "--json"]
    ran = CliRunner().invoke(app, ["calibrate", *arguments, *set_options(BALLOT)])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert (result["length"], result["slots"]) == (LENGTH, LENGTH // 8)
    assert result["layers"][1]["value"] > 1.0 > 10 * result["layers"][0]["value"]
    settings = ["cache.allocation.kind=listed", result["setting"]]
    slots = allocate(load_recipe("tiny-base", [*BALLOT, *settings]).recipe, 2)
    assert sum(slots) == 128 and slots[1] > 5 * slots[0]


def test_shares_are_the_square_roots_of_losses_and_never_nothing() -> None:
    assert shares_of(np.array([0.01, 0.04, 0.09])) == [0.5, 1.0, 1.5]
    assert shares_of(np.array([-1e-9, 1.0])) == [LEAST, 2.0]
    assert shares_of(np.zeros(2)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "problem", "fix"),
    [
        (["cache.method=full"], "evicts nothing", "cache.method=ballot"),
        (["cache.positions=cache"], "the same number of entries", "cache.positions=absolute"),
        (["cache.budget=256", "cache.recent=200"], "an eighth of 1024 tokens is too little", "--length with more"),
    ],
)
def test_a_recipe_whose_layers_cannot_differ_is_refused_before_anything_is_built(
    settings: list[str], problem: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvexport.export.build.build", None)
    with pytest.raises(UsageError, match=problem) as error:
        calibrate_text("tiny-base", [*BALLOT, *settings])
    assert fix in error.value.fix


def test_a_checkpoint_without_a_tokenizer_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tiny_checkpoint / file, tmp_path)
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        calibrate_text("tiny-base", [*BALLOT, f"model.path={tmp_path}", "limits.max_length=256"])
