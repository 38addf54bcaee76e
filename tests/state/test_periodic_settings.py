"""Tests of the recipe's settings of periodic selection: the memory that it needs, and the refusals."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from kvexport.errors import UsageError
from kvexport.export.build import plan_memory
from kvexport.plan.planner import selected_plan
from tests.support.models import SIZES, make_recipe, save_checkpoint
from tests.support.periodic import EVERY, SLOTS, recipe_of


def test_the_plan_counts_both_caches(tiny_checkpoint: Path) -> None:
    plans = [plan_memory(recipe_of(tiny_checkpoint, **s)) for s in ({"slots": None}, {})]
    own = selected_plan(plans[1].recipe, plans[1].cache)
    assert own is not None and {*own.heads("capacity")} == {SLOTS}
    assert {*own.heads("budget")} == {SLOTS - EVERY}
    assert plans[1].sequence_bytes == plans[0].sequence_bytes + own.bytes(1)


@pytest.mark.parametrize(
    ("periodic", "problem"),
    [({"slots": 8}, "slots 8 leaves no slot to select: cache.periodic.every 8 slots stay free")],
)
def test_settings_that_cannot_be_are_refused(tiny_checkpoint: Path, periodic: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        recipe_of(tiny_checkpoint, **periodic)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"speculate": {"draft": "ngram"}}, "verifies with the full cache"),
        ({"cache": {"method": "h2o", "positions": "cache", "periodic": {"slots": 99}}}, "other places there"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    tiny_checkpoint: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        make_recipe(tiny_checkpoint, **{"cache": {"method": "full", "periodic": {"slots": 99}}, **changes})


def test_caches_that_evict_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        tiny_checkpoint, cache={"method": "h2o", "budget": 80, "periodic": {"slots": 99}}, limits={"max_length": 256}
    )
    with pytest.raises(UsageError, match=r"layer 0 has 80 slots, from which h2o evicts") as caught:
        plan_memory(recipe)
    assert "cache.budget=1.0" in caught.value.fix
    save_checkpoint(tmp_path / "windowed", MistralConfig(**SIZES, sliding_window=24))
    recipe = make_recipe(
        tmp_path / "windowed", cache={"method": "full", "periodic": {"slots": 99}}, limits={"max_length": 256}
    )
    with pytest.raises(UsageError, match="layer 0 has a sliding window of 24 tokens"):
        plan_memory(recipe)


def test_slots_without_room_are_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"slots 16, of which 8 are selected, cannot hold 2 sinks, 6 recent") as caught:
        plan_memory(recipe_of(tiny_checkpoint, slots=16))
    assert "cache.periodic.slots=17" in caught.value.fix
