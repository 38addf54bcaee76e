"""Layers that pick tokens with an indexer or attend in chunks are plain attention within a bound, and else refused."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from benchmarks.correctness.decoder_configs import tiny
from benchmarks.correctness.decoder_types import checkpoint_class, reference_logits, save
from kvexport.artifact.reading import load_manifest
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, plan_memory, read_model
from kvexport.export.hooks.indexer import MOST_PICKED
from kvexport.export.model.probe import _Probe
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import recipe_for
from kvexport.validate.runner import validate_artifact
from tests.support import models
from tests.support.command_line import ok

BOUND = 96  # tokens that an indexer picks without leaving one out, or of a chunk
# By type, the field of its text config that is the bound, and further fields.
INDEXED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("index_topk", {}),
    "glm_moe_dsa": ("index_topk", {"indexer_types": ["full", "shared"]}),
    "axk2": ("index_topk", {}),
    "hy_v4": ("index_topk", {}),
    "dots3_note_text": ("index_topk", {}),
    "mistral_large4": (
        "index_topk",
        {
            "num_hidden_layers": 4,
            "layer_types": ["indexed_attention"] * 4,
            "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
        },
    ),
    "glm5_next": ("index_topk", {"index_kpool": 8}),
    "qwen4_exp_text": ("indexer_budget", {}),
    "minimax_m3_vl_text": ("index_topk_blocks", {"index_block_size": 8}),
}
TYPES = {**INDEXED, "llama4_text": ("attention_chunk_size", {}), "llama4": ("attention_chunk_size", {})}


def config_of(name: str, bound: int) -> PretrainedConfig:
    fields = tiny(CONFIG_MAPPING[name])
    field, more = TYPES[name]
    blocks = more.get("index_block_size", 1)
    fields.get("text_config", fields).update({**more, field: bound // blocks})
    config = CONFIG_MAPPING[name](**fields)
    config.architectures = [checkpoint_class(config).__name__]
    return config


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def checkpoint(name: str, bound: int = BOUND) -> Path:
        folder = tmp_path_factory.mktemp(name) / "checkpoint"
        save(config_of(name, bound), folder)
        return folder

    return checkpoint


def recipe_of(checkpoint: Path, **cache: Any) -> Recipe:
    export = {"logits": "all", "prefill_chunk": 32}
    return models.make_recipe(checkpoint, cache=cache, export=export, limits={"max_length": BOUND})


@pytest.mark.parametrize("name", TYPES)
def test_logits_are_transformers_up_to_the_bound(name: str, checkpoints: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints(name)
    artifact = build(recipe_of(checkpoint, method="full"), tmp_path / "artifact")
    ids = models.random_ids(0, BOUND, 60, vocabulary=90)
    right = reference_logits(config_of(name, BOUND), checkpoint, ids)
    for actual, logits in zip(models.given_tokens_logits(load(artifact), ids, (50, 20)), right, strict=True):
        assert np.abs(actual - logits).max() <= 1e-5 * np.abs(logits).max()
    graph = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph
    assert not [x.name for x in graph.initializer if "indexer" in x.name]
    said = "one chunk of 96 tokens" if name.startswith("llama4") else "it would pick 96 tokens"
    assert said in load_manifest(artifact).plain_attention
    assert said in " ".join(ok("inspect", artifact).split())


@pytest.mark.parametrize("name", TYPES)
def test_caches_that_merge_pass_far_past_their_budget(name: str, checkpoints: Any, tmp_path: Path) -> None:
    bound = 96 if name.startswith("llama4") else 16
    cache = {"method": "keepkv", "budget": 12, "sinks": 4, "recent": 4, "merge_every": 4}
    recipe = models.make_recipe(
        checkpoints(name, bound), cache=cache, export={"prefill_chunk": 4}, limits={"max_length": BOUND}
    )
    result = validate_artifact(build(recipe, tmp_path / "artifact"), length=BOUND, batch=2)
    assert result.passed, result.problems
    assert set(result.budgets) == {12} and result.head_merges > 10 and result.first_compared > 0


@pytest.mark.parametrize("name", INDEXED)
def test_an_indexer_leaves_out_tokens_beyond_its_bound_and_none_before(name: str, checkpoints: Any) -> None:
    few, many = (
        checkpoint_class(config).from_pretrained(checkpoints(name), config=config).eval()
        for config in (config_of(name, bound) for bound in (16, 512))
    )
    [most] = {MOST_PICKED[type(x).__name__](x) for part, x in few.named_modules() if part.endswith("indexer")}
    assert most == 16
    ids = torch.from_numpy(models.random_ids(0, 64, vocabulary=90)[0])[None]
    with torch.no_grad():
        own, whole = (model(input_ids=ids).logits[0] for model in (few, many))
    same = (own - whole).abs().amax(-1) <= 1e-5 * whole.abs().max()
    assert same[:most].all() and not same[most:].all()


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp_text"])
def test_a_cache_of_more_slots_than_an_indexer_picks_is_refused(name: str, checkpoints: Any) -> None:
    checkpoint, layer = checkpoints(name, 16), 1 if name == "qwen4_exp_text" else 0
    chunk = ["export.prefill_chunk=4", "cache.merge_every=4", "cache.recent=4", "limits.max_length=64"]

    def refused(*settings: str) -> UsageError:
        with pytest.raises(UsageError) as caught:
            read_model(recipe_for(str(checkpoint), ["cache.budget=64", *chunk, *settings]).recipe)
        return caught.value

    error = refused("cache.budget=13")
    assert error.problem == (
        f"the indexer of layer {layer} would pick only 16 of the 17 slots of its cache, 13 of its budget and 4 for a "
        "call"
    )
    assert error.fix == "--set cache.budget=12, or --set limits.max_length=16"
    read_model(recipe_for(str(checkpoint), ["cache.budget=12", *chunk]).recipe)
    read_model(recipe_for(str(checkpoint), ["cache.budget=64", *chunk[:-1], "limits.max_length=16"]).recipe)
    assert refused("cache.method=full").fix == "--set limits.max_length=16"
    assert refused("cache.budget=12", "cache.merge_prompts=end").fix.startswith("--set cache.merge_prompts=chunks")


def test_the_largest_budget_of_a_plan_is_one_that_an_indexer_allows(checkpoints: Any) -> None:
    cache = {"method": "keepkv", "budget": 12, "recent": 4, "merge_every": 4}
    limits = {"max_length": 64, "max_batch": 1}
    recipe = models.make_recipe(
        checkpoints("deepseek_v32", 24), cache=cache, export={"prefill_chunk": 4}, limits=limits
    )
    plan = plan_memory(recipe)
    assert plan.fit(1 << 40).largest_budget == 20
    assert any("no cache has more than 16 slots" in str(section) for section in plan.sections())


@pytest.mark.parametrize("name", ["llama4_text", "llama4"])
def test_a_sequence_of_several_chunks_is_refused(name: str, checkpoints: Any) -> None:
    recipe = recipe_of(checkpoints(name, 64), method="keepkv", budget=16, recent=4)
    with pytest.raises(UsageError, match=r"layer 0 attends in chunks of 64 .* limits.max_length is 96") as caught:
        read_model(recipe)
    assert caught.value.fix == "--set limits.max_length=64"


def test_a_mask_of_the_tokens_themselves_is_refused(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Probe, "_chunk_of", lambda *_: 0)
    with pytest.raises(UsageError, match="has a mask that depends on more than positions"):
        read_model(recipe_of(checkpoints("llama4_text"), method="full"))
