"""Tests of how layers share the budget."""

import itertools
import re
from typing import Any

import pytest

from kvexport.errors import UsageError
from kvexport.plan.budgets import allocate
from kvexport.plan.cache import CachePlan, LayerGeometry
from kvexport.plan.planner import cache_notes, plan_cache
from kvexport.recipe.fields import MOST, Recipe
from kvexport.recipe.load import load_recipe


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


def test_a_methods_own_allocation_applies_unless_the_recipe_sets_one() -> None:
    assert budgets(5, "pyramidkv") == budgets(5, kind="pyramid") != [100] * 5
    assert budgets(5, "pyramidinfer") == budgets(5, kind="cosine") != [100] * 5
    assert budgets(5, "pyramidkv", kind="uniform") == budgets(5, "snapkv") == [100] * 5


def test_listed_layers_share_the_budget_in_their_ratios() -> None:
    assert budgets(4, kind="listed", shares=[[1], [2], [4], [1]]) == [50, 100, 200, 50]
    assert budgets(4, kind="listed", shares=[[0.5], [1], [2], [0.5]]) == [50, 100, 200, 50]
    assert budgets(4, kind="uniform", shares=[[1], [2], [4], [1]]) == [100] * 4
    assert sum(budgets(7, kind="listed", shares=[[1], [9], [2], [3], [7], [1], [1]])) == 700


def test_slots_beyond_a_layers_capacity_go_to_the_other_layers() -> None:
    recipe: dict[str, Any] = {"model": {"path": "-"}, "limits": {"max_length": 200}}
    cache: dict[str, Any] = {"method": "h2o", "budget": 100, "sinks": 4, "recent": 0.5}
    cache["allocation"] = {"kind": "listed", "shares": [[1000], [2], [1], [0.001]]}
    loaded = Recipe.model_validate({**recipe, "cache": cache})
    assert allocate(loaded, 4) == [200, 125, 63, 12]
    plan_cache(loaded, [LayerGeometry(2, 1, 8, 8)] * 4)  # every layer has room for its sinks and recent slots
    cache["allocation"]["whole"] = [1]
    assert allocate(Recipe.model_validate({**recipe, "cache": cache}), 4) == [176, 200, 12, 12]
    # Nothing is left to share: all layers get the same.
    assert allocate(Recipe.model_validate({**recipe, "cache": {**cache, "budget": 230}}), 4) == [240, 200, 240, 240]


def test_shares_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"shares has 3 lists, the model has 4 layers") as caught:
        budgets(4, kind="listed", shares=[[1], [2], [4]])
    assert "--set cache.allocation.kind=uniform" in caught.value.fix
    with pytest.raises(UsageError, match="shares has 0 lists"):
        budgets(4, kind="listed")


def test_listed_heads_have_budgets_of_their_own_in_the_same_bytes() -> None:
    shares = [[1, 3], [2, 2], [0.5, 3.5]]
    assert budgets(3, kind="listed", shares=shares) == [50, 150, 100, 100, 25, 175]
    geometry = [LayerGeometry(8, 2, 16, 16)] * 3
    uniform, apart = (plan_of(geometry, kind=kind, shares=shares) for kind in ("uniform", "listed"))
    assert [(x.kv_heads, x.budget, x.recent) for x in apart.caches[:2]] == [
        (2, (50, 150), (25, 75)),
        (2, (100,) * 2, (50,) * 2),
    ]
    assert apart.bytes() == uniform.bytes()
    slack = 100 + uniform.caches[0].slots // 2 - 200
    assert apart.caches[2].shapes(3)["key"] == (3, sum((25 + slack, 175 + slack)), 16)
    assert apart.heads("budget").tolist() == [50, 150, 100, 100, 25, 175]
    assert apart.by_layer("abcdef") == ["ab", "cd", "ef"]
    # All heads of a whole layer are whole. A method that evicts nothing ignores shares.
    cache = {"method": "h2o", "budget": 100, "allocation": {"kind": "listed", "shares": shares, "whole": [1]}}
    recipe = Recipe.model_validate({"model": {"path": "-"}, "limits": {"max_length": 150}, "cache": cache})
    assert allocate(recipe, 3) == [38, 112, 150, 150, 19, 131]
    assert budgets(3, "full", kind="listed", shares=shares) == [4096] * 3


def plan_of(geometry: list[LayerGeometry], **allocation: Any) -> CachePlan:
    cache = {"method": "h2o", "budget": 100, "allocation": allocation}
    return plan_cache(Recipe.model_validate({"model": {"path": "-"}, "cache": cache}), geometry)


def test_shares_of_other_heads_or_for_positions_in_the_cache_are_refused() -> None:
    geometry = [LayerGeometry(8, 2, 16, 16)] * 2
    with pytest.raises(UsageError, match="has 3 numbers for the KV heads of layer 1, which has 2") as caught:
        plan_of(geometry, kind="listed", shares=[[1, 3], [2, 2, 1]])
    assert "a number for each KV head" in caught.value.fix
    recipe: dict[str, Any] = {"model": {"path": "-"}}
    recipe["cache"] = {"method": "h2o", "budget": 100, "allocation": {"kind": "listed", "shares": [[1, 3], [2, 2]]}}
    with pytest.raises(UsageError, match="KV heads have budgets of 50 to 150 slots: a new token"):
        recipe["cache"]["positions"] = "cache"
        plan_cache(Recipe.model_validate(recipe), geometry)
    with pytest.raises(ValueError, match=r"shares"):
        plan_of(geometry, kind="listed", shares=[[1, 3], 2])


def test_whole_layers_keep_all_entries_and_the_others_share_the_remaining_budget() -> None:
    recipe = {"model": {"path": "-"}, "limits": {"max_length": 1000}}
    for kind in ("uniform", "cosine", "pyramid"):
        cache = {"method": "h2o", "budget": 301, "allocation": {"kind": kind, "whole": [7, 2]}}
        budgets_of_layers = allocate(Recipe.model_validate({**recipe, "cache": cache}), 10)
        others = [slots for i, slots in enumerate(budgets_of_layers) if i not in (2, 7)]
        assert budgets_of_layers[2] == budgets_of_layers[7] == 1000
        assert sum(budgets_of_layers) == 3010
        assert others == sorted(others, reverse=True) or kind == "uniform"
        assert max(others) - min(others) <= 1 or kind != "uniform"


def test_whole_layers_change_no_method_that_evicts_nothing() -> None:
    assert budgets(3, "full", whole=[1]) == [4096] * 3


@pytest.mark.parametrize(
    ("whole", "problem", "fix"),
    [
        ([5], "names layer 5, the model has 0 to 3", "whole=[]"),
        ([0, 1], "2 whole layers of limits.max_length 4096 slots take 8192 of the 400", "cache.budget=2051"),
    ],
)
def test_whole_layers_that_cannot_be_are_refused_with_the_line_that_fixes_it(
    whole: list[int], problem: str, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        budgets(4, whole=whole)
    assert problem in str(caught.value)
    assert fix in str(caught.value.fix)


def test_the_budget_that_a_refusal_names_is_enough() -> None:
    cache = {"method": "h2o", "budget": 2051, "recent": 0, "allocation": {"whole": [0, 1]}}
    assert allocate(Recipe.model_validate({"model": {"path": "-"}, "cache": cache}), 4) == [4096, 4096, 6, 6]


def test_a_layer_is_whole_once() -> None:
    with pytest.raises(ValueError, match="names layer 3 twice"):
        budgets(4, whole=[3, 1, 3])


@pytest.mark.parametrize("section", [("cache", "slack"), ("cache", "merge_every"), ("export", "prefill_chunk")])
def test_slots_that_cannot_be_counted_are_refused(section: tuple[str, str]) -> None:
    recipe: dict[str, Any] = {"model": {"path": "-"}, "cache": {"budget": 8, "sinks": 1}, "limits": {"max_length": 64}}
    recipe[section[0]] = {**recipe.get(section[0], {}), section[1]: MOST}
    with pytest.raises(UsageError, match=f"layer 0 would have {MOST + 8} slots") as caught:
        plan_cache(Recipe.model_validate(recipe), [LayerGeometry(4, 2, 8, 8)])
    assert section[1] in caught.value.fix


@pytest.mark.parametrize(("settings", "problem"), [
    ({"cache": {"recent": 100}}, "has a budget of 88 slots"), ({"cache": {"slack": MOST}}, "would have"),
    ({"speculate": {"draft": "ngram"}}, "may have merged them into"),
    ({"cache": {"periodic": {"slots": 200}}}, "evicts nothing, but"),
])  # fmt: skip
def test_refusals_name_the_layer_or_the_head_that_has_the_cache(settings: dict[str, Any], problem: str) -> None:
    geometry = [LayerGeometry(8, 2, 16, 16)] * 2
    heads = {"kind": "listed", "shares": [[1, 1], [1, 1]], "whole": [0]}
    for allocation, name in (({"whole": [0]}, "layer 1"), (heads, "KV head 0 of layer 1")):
        cache = {"method": "h2o", "budget": 300, "allocation": allocation, **settings.get("cache", {})}
        recipe = {"model": {"path": "-"}, "limits": {"max_length": 512}, **settings, "cache": cache}
        with pytest.raises(UsageError) as caught:
            plan_cache(Recipe.model_validate(recipe), geometry)
        text = str(caught.value)
        assert f"{name} {problem}" in text or f"{problem} {name}" in text


@pytest.mark.parametrize("text", ["limits.max_batch=65537", "backend.threads=1025", f"export.prefill_chunk={10**30}"])
def test_more_than_any_machine_has_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        load_recipe("tiny-keepkv", [text])


@pytest.mark.parametrize("length", [512, "unlimited"])
def test_whole_layers_and_positions_in_the_cache_are_refused_together(length: int | str) -> None:
    cache = {"method": "h2o", "budget": 300, "positions": "cache", "allocation": {"whole": [1]}}
    recipe = {"model": {"path": "-"}, "cache": cache, "limits": {"max_length": length}}
    with pytest.raises(UsageError, match=r"lets layers \[1\] hold more") as caught:
        plan_cache(Recipe.model_validate(recipe), [LayerGeometry(2, 2, 8, 8)] * 2)
    assert "--set cache.allocation.whole=[]" in caught.value.fix


def pinned_plan(geometry: list[LayerGeometry] | None = None, length: int = 4096, **cache: Any) -> CachePlan:
    recipe = {"model": {"path": "-"}, "limits": {"max_length": length}}
    recipe["cache"] = {"method": "h2o", "budget": 100, "pinned": 64, **cache}
    return plan_cache(Recipe.model_validate(recipe), geometry or [LayerGeometry(8, 2, 16, 16)] * 2)


def test_room_for_pinned_tokens_is_beside_every_heads_budget() -> None:
    shares = [[1, 3], [2, 2]]
    without = pinned_plan(pinned=0, allocation={"kind": "listed", "shares": shares})
    plan = pinned_plan(allocation={"kind": "listed", "shares": shares})
    assert (plan.heads("budget") - without.heads("budget")).tolist() == [64] * 4
    assert (plan.heads("capacity") - without.heads("capacity")).tolist() == [64] * 4
    assert [x.recent for x in plan.caches] == [x.recent for x in without.caches]
    windowed = pinned_plan([LayerGeometry(8, 2, 16, 16, sliding_window=50), LayerGeometry(8, 2, 16, 16)])
    assert [x.budget[0] for x in windowed.caches] == [50, 164]
    assert not any(x.merges for x in pinned_plan(length=150).caches)  # nothing is evicted any more
    recipe = Recipe.model_validate({"model": {"path": "-"}, "cache": {"method": "h2o", "budget": 100, "pinned": 64}})
    assert cache_notes(recipe, plan) == ["64 slots of each budget are room for pinned tokens (cache.pinned)"]


@pytest.mark.parametrize(("settings", "windows", "why"), [
    ({"method": "full"}, 0, "the method full evicts nothing"),
    ({"periodic": {"slots": 128}}, 0, "cache.periodic.slots is 128"),
    ({"positions": "cache"}, 0, "cache.positions is cache"), ({}, 50, "every layer has a sliding window"),
])  # fmt: skip
def test_room_for_pinned_tokens_without_a_meaning_is_refused(settings: dict[str, Any], windows: int, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        pinned_plan([LayerGeometry(8, 2, 16, 16, sliding_window=windows)], **settings)
    assert "--set cache.pinned=0" in caught.value.fix
