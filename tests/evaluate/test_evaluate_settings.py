"""Tests of eval's budgets and labels: their meaning, and the equal bytes of equal budgets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvexport.errors import UsageError
from kvexport.evaluate.settings import equal_bytes, longer_checkpoint, overrides_of, parse_budgets
from kvexport.plan.cache import LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.inherit import recipe_folder

GEOMETRY = [LayerGeometry(4, 2, 32, 32)] * 2


def test_budgets_are_shares_or_slots() -> None:
    assert parse_budgets("1/8, 0.5,64,1/8") == [0.125, 0.5, 64.0]
    assert parse_budgets("1/1") == [1.0]
    for wrong in ("0", "x", "1.5", "-1/2", "1/0", "", "nan", "inf", "9" * 23, "inf/inf"):
        with pytest.raises(UsageError, match="is no budget"):
            parse_budgets(wrong)


def test_labels_set_parameters() -> None:
    assert overrides_of("keepkv:threshold=0.7:cache.recent=0.8") == [
        "cache.method=keepkv",
        "cache.parameters.threshold=0.7",
        "cache.recent=0.8",
    ]


def test_budgets_have_equal_bytes() -> None:
    # cosine allocation rounds layer by layer; a longer merge interval costs slack.
    labels = ["streaming", "h2o", "keepkv:cache.allocation.kind=cosine", "streaming:cache.merge_every=64"]
    compared = equal_bytes("tiny-base", labels, [0.125, 100], 512, GEOMETRY, [])
    assert [(c.label, c.budget) for c in compared] == [(label, budget) for budget in (0.125, 100) for label in labels]
    for budget, slots in ((0.125, 64), (100, 100)):
        group = [c for c in compared if c.budget == budget]
        limit = group[0].bytes
        assert group[0].slots == slots
        assert group[3].slots == slots - 32  # minus the slots of the slack
        for setting in group:
            cache = setting.recipe.cache
            assert setting.bytes == plan_cache(setting.recipe, GEOMETRY).bytes() <= limit
            more = setting.recipe.model_copy(update={"cache": cache.model_copy(update={"budget": setting.slots + 1})})
            assert plan_cache(more, GEOMETRY).bytes() > limit


def test_the_bytes_of_a_prompt_compressed_once_are_those_after_it() -> None:
    whole = ["cache.merge_prompts=end", "export.prefill_chunk=8"]  # merge_every is 8
    actual = equal_bytes("tiny-base", ["h2o", "ballot"], [0.125], 512, GEOMETRY, whole)
    expected = equal_bytes("tiny-base", ["h2o", "ballot"], [0.125], 512, GEOMETRY, whole[1:])
    assert [(c.slots, c.bytes) for c in actual] == [(c.slots, c.bytes) for c in expected]
    assert {slots for c in actual for layer in plan_cache(c.recipe, GEOMETRY).caches for slots in layer.capacity} == {
        1024
    }


def test_a_longer_checkpoint_shares_the_weights(tmp_path: Path) -> None:
    original = recipe_folder() / "checkpoints" / "tiny"
    copy = tmp_path / "original"
    shutil.copytree(original, copy)
    longer = longer_checkpoint(copy, tmp_path / "longer", 40960)
    config = json.loads((copy / "config.json").read_text())
    assert json.loads((longer / "config.json").read_text()) == {**config, "max_position_embeddings": 40960}
    assert (copy / "model.safetensors").samefile(longer / "model.safetensors")
    (copy / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    )
    with pytest.raises(UsageError, match="is dynamic"):
        longer_checkpoint(copy, tmp_path / "again", 40960)
