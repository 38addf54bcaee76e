"""Layers that attend to the cache of another layer: their tokens, and the settings that they refuse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from transformers import Gemma3nTextConfig, Gemma4TextConfig

from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.model.layerwise import LayerwiseDecoder
from kvexport.export.model.probe import _require_same_attention
from kvexport.recipe.fields import Recipe
from tests.export.test_refusals import dummy_checkpoint
from tests.support import models

WINDOW, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    **models.SIZES, "num_hidden_layers": 5, "layer_types": [WINDOW, FULL, WINDOW, WINDOW, FULL], "head_dim": 16,
    "global_head_dim": 16, "sliding_window": 24, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "gemma4_text": lambda: Gemma4TextConfig(**SIZES),
    "gemma3n_text": lambda: Gemma3nTextConfig(
        **SIZES, altup_num_inputs=2, laurel_rank=8, activation_sparsity_pattern=[0.0] * 5
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_checkpoint(tmp_path_factory.mktemp("shared") / "checkpoint", CONFIGS["gemma4_text"]())


def recipe_for(checkpoint: Path, **sections: Any) -> Recipe:
    limits = {"max_length": 160, "max_batch": 2}
    return models.make_recipe(checkpoint, limits=limits, **{"cache": {"method": "full"}, **sections})


@pytest.mark.parametrize("name", CONFIGS)
def test_only_layers_with_keys_of_their_own_have_caches(name: str, tmp_path: Path) -> None:
    shape = read_model(recipe_for(dummy_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())), weights=False)
    assert shape.plan.attention_layers == (0, 1, 2)
    assert [layer.sliding_window for layer in shape.geometry] == [24, 0, 24]


def test_drafts_in_chunks_and_a_window_give_the_logits_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    export = {"logits": "all", "prefill_chunk": 32}
    engine = load(build(recipe_for(checkpoint, export=export, speculate={"draft": "ngram"}), tmp_path / "artifact"))
    ids = models.random_ids(0, 90, 60)
    own = models.given_tokens_logits(engine, ids, (50, 20))
    for mine, right in zip(own, models.hugging_face_logits(checkpoint, ids), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-4 * np.abs(right).max())
    repeating = np.tile(ids[1][:7], 6)
    drafted = engine.generate([repeating.tolist()], max_tokens=24)[0].token_ids
    read = np.concatenate([repeating, drafted])
    likely = models.hugging_face_logits(checkpoint, [read])[0].argmax(-1)
    assert len(drafted) == 24
    assert list(drafted) == likely[len(repeating) - 1 : -1].tolist()


def test_a_layer_with_sparse_activations_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    """The share of activations that Gemma 3n keeps is a constant that goes through the inverse error function."""
    config = Gemma3nTextConfig(
        **SIZES, altup_num_inputs=2, laurel_rank=8, activation_sparsity_pattern=[0.95, 0.5, 0.0, 0.0, 0.8]
    )
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", config)
    recipe = recipe_for(checkpoint, export={"logits": "all", "prefill_chunk": 32})
    artifact = build(recipe, tmp_path / "artifact")
    models.assert_logits_of_transformers(load(artifact), checkpoint, 1e-4)
    graph = onnx.load(str(artifact / "decoder.onnx"), load_external_data=False)
    assert not {"Erf", "Log"} & {node.op_type for node in graph.graph.node}  # all of it is folded


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "shares of heads": (
        {"cache": {"method": "keepkv", "budget": 32, "allocation": {"kind": "listed", "shares": [[1.0, 1.0]] * 3}}},
        "cache.allocation.shares gives KV heads budgets of their own",
        "cache.allocation.kind=uniform",
    ),
    "periodic": ({"cache": {"method": "full", "periodic": {"slots": 128}}}, "cache.periodic.slots is 128", "=null"),
    "TensorRT": ({"backend": {"name": "tensorrt"}}, "backend.name is tensorrt", "backend.name=onnxruntime"),
    "CUDA": ({"backend": {"name": "onnxruntime", "device": "cuda"}}, "backend.device is cuda", "device=cpu"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_need_a_cache_in_every_layer_are_refused(setting: str, checkpoint: Path) -> None:
    sections, problem, fix = REFUSED[setting]
    data = recipe_for(checkpoint).model_dump()
    recipe = Recipe.model_validate({**data, **sections})
    with pytest.raises(UsageError) as caught:
        read_model(recipe)
    assert problem in caught.value.problem
    assert "layer 3 reads the cache of layer 2" in caught.value.problem
    assert fix in caught.value.fix


def test_budgets_cannot_be_measured(checkpoint: Path) -> None:
    shape = read_model(recipe_for(checkpoint))
    with pytest.raises(UsageError, match="the last 2 layers of gemma4_text read the caches of other layers"):
        LayerwiseDecoder(shape.checkpoint, recipe_for(checkpoint))


def test_a_layer_with_another_attention_than_the_cache_that_it_reads_is_refused(checkpoint: Path) -> None:
    own = read_model(recipe_for(checkpoint)).geometry[0]
    _require_same_attention("layer 3", replace(own, query_heads=2), 2, own)
    with pytest.raises(UsageError, match=r"layer 3 reads the cache of layer 2 with sliding_window 12, but .* has 24"):
        _require_same_attention("layer 3", replace(own, sliding_window=12), 2, own)
