"""Tests of positions in the cache: which models and recipes can have them, and which errors the others get."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from kvexport.errors import UsageError
from kvexport.export.build import plan_memory, read_model
from kvexport.export.graph.graphs import merge_attributes
from kvexport.ops.onnx_function import merge_cache_node_attributes
from kvexport.recipe.fields import MOST, Recipe
from kvexport.recipe.load import load_recipe
from tests.export.test_refusals import dummy_checkpoint
from tests.support import hybrids, models
from tests.support.models import make_recipe

CACHE = {"method": "keepkv", "budget": 32, "sinks": 2, "recent": 8, "merge_every": 4, "positions": "cache"}


def recipe_for(checkpoint: Path, length: Any = "unlimited", **cache: Any) -> Recipe:
    limits = {"max_length": length, "max_batch": 2}
    return make_recipe(checkpoint, cache={**CACHE, **cache}, export={"prefill_chunk": 16}, limits=limits)


def refusal(recipe: Recipe) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_model(recipe, weights=False)
    return caught.value


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_checkpoint(tmp_path_factory.mktemp("llama") / "checkpoint", models.llama())


def test_layers_of_different_budgets_are_refused(llama: Path) -> None:
    error = refusal(recipe_for(llama, method="pyramidkv"))
    assert "layers have budgets of 21 to 43 slots" in error.problem
    assert error.fix == "--set cache.allocation.kind=uniform"
    uniform = recipe_for(llama, method="pyramidkv", allocation={"kind": "uniform"})
    assert read_model(uniform, weights=False).plan.cache_positions


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**models.SIZES, sliding_window=24)
    error = refusal(recipe_for(dummy_checkpoint(tmp_path / "checkpoint", config)))
    assert "layer 0 has a sliding window of 24 positions" in error.problem
    assert error.fix == "--set cache.positions=absolute"


def test_learned_positions_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=512)
    error = refusal(recipe_for(dummy_checkpoint(tmp_path / "checkpoint", config)))
    assert "gpt2: cache.positions: cache turns keys to their places in the cache" in error.problem
    assert "no layer rotates keys" in error.problem
    assert error.fix == "--set cache.positions=absolute"


def test_a_recurrent_state_is_refused(tmp_path: Path) -> None:
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", hybrids.CONFIGS["qwen3_5_text"]())
    error = refusal(recipe_for(checkpoint))
    assert error.problem == "cache.positions is cache, which is not supported where layer 0 has a recurrent state"
    assert error.fix == "--set cache.positions=absolute"


def test_a_method_that_rotates_keys_knows_the_frequencies_beside_recurrent_states(tmp_path: Path) -> None:
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", hybrids.CONFIGS["qwen3_5_text"]())
    shape = read_model(recipe_for(checkpoint, length=256, positions="absolute", method="asymkv"), weights=False)
    assert [len(layer.rotary.inverse_frequencies) for layer in shape.geometry] == [2]


def test_queries_that_are_scaled_by_their_positions_are_refused(tmp_path: Path) -> None:
    config = transformers.Ministral3Config(**models.SIZES, head_dim=16, sliding_window=None)
    error = refusal(recipe_for(dummy_checkpoint(tmp_path / "checkpoint", config)))
    assert "queries are also scaled by their positions" in error.problem


def test_more_places_than_the_model_has_positions(llama: Path) -> None:
    error = refusal(recipe_for(llama, budget=500))
    assert "the cache has 516 places (budget and slack), but llama has 512 positions" in error.problem
    assert error.fix.startswith("--set cache.budget=496,")
    assert read_model(recipe_for(llama, budget=496), weights=False).plan.caches[0].capacity[0] == 512


def test_no_end_with_absolute_positions(llama: Path) -> None:
    error = refusal(recipe_for(llama, positions="absolute"))
    assert error.problem == "limits.max_length is unlimited, but llama has 512 positions"
    assert error.fix == "--set limits.max_length=512, or --set cache.positions=cache"


@pytest.mark.parametrize(("setting", "problem"), [
    ("cache.method=full", "limits.max_length is unlimited, but full keeps every token"),
    ("cache.budget=0.25", "cache.budget is a share of limits.max_length, which is unlimited: write slots"),
    ("limits.max_length=endless", "found 'endless'"),
    (f"limits.max_length={MOST + 1}", "less than or equal to 2147483647"), ("cache.positions=relative", "positions"),
])  # fmt: skip
def test_an_unlimited_recipe_names_the_settings_that_it_excludes(setting: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("tiny-keepkv", ["cache.positions=cache", "limits.max_length=unlimited", setting])
    assert problem in caught.value.problem


def test_unlimited_is_read_as_it_is_written() -> None:
    recipe = load_recipe("smollm2-135m-chat").recipe
    written = recipe.model_dump(mode="json")
    assert written["limits"]["max_length"] == "unlimited"
    assert Recipe.model_validate(written) == recipe
    assert recipe.limits.max_length == MOST
    assert recipe.rotary_length == 512 + 256, "budget and slack"


def test_a_plan_without_an_end_has_no_full_cache_to_compare_with(tmp_path: Path) -> None:
    llama = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    plan = plan_memory(recipe_for(llama))
    assert (plan.full_bytes, plan.ratio) == (None, None)
    assert plan.to_json()["max_length"] == "unlimited"
    assert plan.sections()
    assert plan.sequence_bytes == plan_memory(recipe_for(llama, length=512)).sequence_bytes


def test_layers_that_rotate_nothing_stay_as_they_are(tmp_path: Path) -> None:
    """A layer without rotary embedding gets no cache positions, as every fourth layer of SmolLM3."""
    config = transformers.SmolLM3Config(**{**models.SIZES, "num_hidden_layers": 4}, no_rope_layers=[1, 1, 1, 0])
    recipe = recipe_for(dummy_checkpoint(tmp_path / "checkpoint", config))
    layers = read_model(recipe, weights=False).plan.caches
    nodes = [merge_cache_node_attributes(merge_attributes(layer, recipe.cache.build_method())) for layer in layers]
    turned = [{"cache_positions", "inverse_frequencies"} <= node.keys() for node in nodes]
    assert turned == [True, True, True, False]


def test_absolute_positions_put_nothing_new_into_a_graph(llama: Path) -> None:
    rotary = read_model(recipe_for(llama, length=512, positions="absolute"), weights=False).plan.caches[0].rotary
    assert not rotary.cache_positions
    assert not rotary.inverse_frequencies
