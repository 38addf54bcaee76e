"""Decoders with recurrent states: convolutions, the gated delta rule and Mamba-2 equal transformers, and are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from transformers import JambaConfig

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.ops.linear_attention import DOMAIN, UpdateRule, linear_attention, linear_attention_function
from kvexport.recipe.fields import Recipe
from kvexport.validate.runner import validate_artifact
from tests.support import models
from tests.support.hybrids import CONFIGS, SIZES


def recipe_of(checkpoint: Path, budget: float | int = 1.0, method: str = "full", **sections: Any) -> Recipe:
    cache = {"method": method, "budget": budget, "sinks": 2, "recent": 4, "merge_every": 4}
    export = {"logits": "all", "prefill_chunk": 32}
    return models.make_recipe(checkpoint, cache=cache, export=export, limits={"max_length": 160}, **sections)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    """An engine of Qwen3.5 (gated delta rule and attention) whose cache holds every token, and the checkpoint."""
    folder = tmp_path_factory.mktemp("hybrid")
    checkpoint = models.save_checkpoint(folder / "checkpoint", CONFIGS["qwen3_5_text"]())
    return load(build(recipe_of(checkpoint), folder / "artifact")), checkpoint


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba", "falcon_h1"])
def test_logits_are_transformers_in_ragged_batches(name: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    engine = load(build(recipe_of(checkpoint), tmp_path / "artifact"))
    ids = models.random_ids(0, 90, 60)
    right = models.hugging_face_logits(checkpoint, ids)
    for found, logits in zip(models.given_tokens_logits(engine, ids, (50, 20)), right, strict=True):
        assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits).max()


def test_a_lane_that_is_saved_and_restored_in_the_middle_goes_on(hybrid: tuple[Engine, Path]) -> None:
    engine, checkpoint = hybrid
    (ids,) = models.random_ids(1, 70)
    (right,) = models.hugging_face_logits(checkpoint, [ids])
    lanes = engine.lanes(2)
    lanes.append([ids[:30], ids[:0]], prefill=True)
    saved = lanes.save(0)
    lanes.append([models.random_ids(2, 9)[0], models.random_ids(3, 20)[0]], prefill=True)  # both lanes go elsewhere
    lanes.restore(1, saved)
    rows = [lanes.append([ids[:0], ids[30:50]], prefill=True)[1, :20].copy()]
    rows += [lanes.append([ids[:0], ids[i : i + 1]], prefill=False)[1, :1].copy() for i in range(50, 70)]
    assert np.abs(np.concatenate(rows) - right[30:]).max() <= 1e-4 * np.abs(right).max()


def test_an_idle_lane_keeps_its_state_bit_by_bit(hybrid: tuple[Engine, Path]) -> None:
    lanes = hybrid[0].lanes(2)
    first, second = models.random_ids(4, 20, 25)
    lanes.append([first, second], prefill=True)
    before = lanes.read(0)
    lanes.append([first[:0], second[:7]], prefill=True)
    after = lanes.read(0)
    assert any("recurrent_state" in name for name in before) and any("conv_state" in name for name in before)
    assert all(np.array_equal(array, after[name]) for name, array in before.items())


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "bamba"])
def test_keys_are_merged_past_the_budget(name: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    artifact = build(recipe_of(checkpoint, 16, "keepkv"), tmp_path / "artifact")
    result = validate_artifact(artifact, length=120, batch=2)
    assert result.passed, result.problems


def test_drafts_are_refused_by_name(hybrid: tuple[Engine, Path]) -> None:
    with pytest.raises(UsageError, match="layer 0 has a recurrent state, from which no token can be removed"):
        read_model(recipe_of(hybrid[1], speculate={"draft": "ngram"}))


def test_another_recurrence_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", JambaConfig(**SIZES, num_experts=2))
    with pytest.raises(UsageError, match="computes its recurrent state in code of its own"):
        read_model(recipe_of(checkpoint))


@pytest.mark.parametrize("domain", ["kernel", "function"])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("update_rule", ["linear", "gated", "delta", "gated_delta"])
def test_kernel_and_function_equal_the_definition(update_rule: UpdateRule, by_channel: bool, domain: str) -> None:
    torch.manual_seed(0)
    batch, tokens, heads, key_size, value_size = 2, 9, 3, 8, 6
    tensors: dict[str, Any] = {
        "query": torch.randn(batch, tokens, heads * key_size),
        "key": torch.randn(batch, tokens, heads * key_size) * 0.3,
        "value": torch.randn(batch, tokens, heads * value_size),
        "past_state": torch.randn(batch, heads, key_size, value_size),
        "decay": -torch.rand(batch, tokens, heads * (key_size if by_channel else 1)),
        "beta": torch.rand(batch, tokens, heads),
    }
    for name, rule in (("decay", "gated"), ("beta", "delta")):
        if rule not in update_rule:
            tensors[name] = None
    expected = linear_attention(**tensors, heads=heads, update_rule=update_rule, scale=0.4)
    function = linear_attention_function(update_rule)
    assert function.domain == DOMAIN
    function.domain = DOMAIN if domain == "kernel" else "another.domain"
    inputs = [name if x is not None else "" for name, x in tensors.items()]
    node = helper.make_node(
        "LinearAttention", inputs, ["output", "state"], domain=function.domain, q_num_heads=heads, kv_num_heads=heads,
        update_rule=update_rule, scale=0.4,
    )  # fmt: skip
    feed = {name: x.numpy() for name, x in tensors.items() if x is not None}
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, x.shape) for name, x in feed.items()]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("output", "state")]
    versions = [helper.make_opsetid("", 23), helper.make_opsetid(function.domain, 1)]
    graph = helper.make_graph([node], "graph", info, results)
    model = helper.make_model(graph, opset_imports=versions, ir_version=11, functions=[function])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for found, right in zip(session.run(None, feed), expected, strict=True):
        assert np.abs(found - right.numpy()).max() < 1e-5
