"""A build compares its cache with the full one on a text, and warns of a cache that is far worse than dropping."""

from typing import Any

import pytest

from kvexport.calibrate.guard import Divergence, divergence
from kvexport.export.build import read_model
from kvexport.recipe.load import recipe_for
from tests.support.elsewhere import ELSEWHERE, elsewhere
from tests.support.paths import ROOT

SMALL = ROOT / "tests" / "checkpoints" / "small"


def compared(*settings: str, slots: int = 24, device: Any = "cpu") -> Divergence:
    recipe = recipe_for(str(SMALL), [f"cache.budget={slots}", "limits.max_length=256", *settings]).recipe
    ids = list(range(5, 69))
    return divergence(recipe, read_model(recipe), ids, slots, device)


def test_fewer_slots_are_farther_from_the_full_cache() -> None:
    few, many, all_slots = (compared(slots=slots) for slots in (13, 24, 63))
    assert few.built > many.built > 0 and few.dropped > many.dropped > 0
    assert all_slots.built < 1e-4
    assert f"{few.built:.3g} nats" in few.line and "with 13 slots" in few.line


def test_a_gpu_finds_the_distances_of_the_cpu() -> None:
    expected = compared()
    with elsewhere():
        there = compared(device=ELSEWHERE)
    assert (there.built, there.dropped) == pytest.approx((expected.built, expected.dropped), rel=1e-2)


def test_dropping_is_as_far_as_itself_with_any_shares() -> None:
    dropping = compared("cache.method=h2o")
    assert dropping.built == pytest.approx(dropping.dropped)
    shares = [[0.5, 1.5]] * 6
    listed = compared("cache.method=h2o", "cache.allocation.kind=listed", f"cache.allocation.shares={shares}")
    assert listed.dropped == pytest.approx(dropping.dropped) and listed.built != pytest.approx(dropping.built)


def test_a_cache_that_is_far_worse_than_dropping_is_named() -> None:
    assert Divergence(64, 1024, 0.3, 0.05).warning == ""
    assert Divergence(512, 256, 2e-7, 1e-9).warning == Divergence(512, 256, 0.0, 0.0).warning == ""
    warning = Divergence(64, 1024, 1.0, 0.05).warning
    assert "20 times as far" in warning and "--set cache.method=h2o" in warning
