"""Per-head budgets on TensorRT, on fakes of TensorRT and CUDA: a layer is one plugin of each operator."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.graphs import for_tensorrt, plugin_refusal
from kvexport.backends.tensorrt.plugin import refusal, register
from kvexport.recipe.fields import Recipe
from tests.support import fake_tensorrt
from tests.support.tensorrt_artifacts import engines, generated
from tests.support.tensorrt_walk import attribute, graphs, problems
from tests.support.tiny_model import RECIPE

ALLOCATION = {"kind": "listed", "shares": [[0.5, 1.5], [1.25, 0.75]]}
OPERATORS = ("VoteAttention", "MergeCache")


@pytest.fixture(scope="module")
def heads(tiny_checkpoint: Path) -> Path:
    """An artifact of the tiny Llama whose four KV heads have budgets of their own."""
    cache = {**RECIPE["cache"], "allocation": ALLOCATION}
    recipe = {**RECIPE, "model": {"path": str(tiny_checkpoint)}, "cache": cache}
    return kvexport.build(Recipe.model_validate(recipe), tiny_checkpoint.parent / "heads")


def own_nodes(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == "kvexport")


@pytest.mark.parametrize(("kind", "operator"), zip(("decoder", "merge"), OPERATORS, strict=True))
def test_a_layer_is_one_plugin_or_standard_operators(heads: Path, kind: str, operator: str) -> None:
    model = graphs(heads)[kind]
    before = model.SerializeToString(deterministic=True)
    for refuses, nodes, why in ((lambda _: None, {operator: 2}, ""), (plugin_refusal("off"), {}, "off")):
        seen, whys = for_tensorrt(model, refuses)
        assert (own_nodes(seen), whys) == (nodes, {operator: why})
        assert not list(problems(seen)) and not seen.functions
        for node in (node for node in seen.graph.node if node.domain == "kvexport"):
            assert not node.overload
    assert model.SerializeToString(deterministic=True) == before


def test_the_plugin_nodes_have_the_slots_and_budgets_of_every_head(heads: Path) -> None:
    seen = {kind: for_tensorrt(model, lambda _: None)[0] for kind, model in graphs(heads).items()}
    caches = load_manifest(heads).cache.caches
    for kind, operator in zip(("decoder", "merge"), OPERATORS, strict=True):
        nodes = [node for node in seen[kind].graph.node if node.op_type == operator]
        assert [attribute(node, "capacity") for node in nodes] == [list(cache.capacity) for cache in caches]
    budgets = [attribute(node, "budget") for node in seen["merge"].graph.node]
    assert budgets == [list(cache.budget) for cache in caches] and all(len({*budget}) == 2 for budget in budgets)


def test_an_engine_of_plugins_computes_what_onnx_runtime_does(
    heads: Path, tmp_path: Path, plugins: Path, gpu: Any
) -> None:
    artifact = engines(heads, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest.operators == dict.fromkeys(OPERATORS, "plugin")
    assert manifest.engines["tensorrt"]["functions"] == {}
    assert list(fake_tensorrt.IPluginCreatorV3One.fields["budget"][1]) == list(manifest.cache.caches[-1].budget)
    states = [kvexport.load(path).new_state(2) for path in (artifact, heads)]
    assert states[0].spare is None, "past and present state have one address"
    ids = np.random.default_rng(0).integers(0, 64, (2, 16))
    for part, lengths in ((ids, [16, 4]), (ids[:, :1], [1, 1]), (ids, [16, 16]), (ids, [16, 16])):
        for state in states:
            state.decode(part, np.array(lengths)[:, None])
            state.merge(0, 2)
    actual, expected = (state.get_state() for state in states)
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, atol=1e-5, err_msg=name)
    assert generated(artifact) == generated(heads)


def test_engines_without_plugins_compute_what_onnx_runtime_does(heads: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = engines(heads, tmp_path / "a")
    assert load_manifest(artifact).operators == dict.fromkeys(OPERATORS, "function")
    assert generated(artifact) == generated(heads)


def test_the_plugin_is_not_asked_for_layers_with_extra_state(heads: Path, plugins: Path) -> None:
    register(fake_tensorrt)
    nodes = [node for model in graphs(heads).values() for node in model.graph.node if node.op_type in OPERATORS]
    assert {node.op_type for node in nodes} == {*OPERATORS}
    for node in nodes:
        assert refusal(fake_tensorrt, node) is None
        node.input.append("past_key_values.1.query_seen")
        node.output.append("present.1.query_seen")
        assert "a method that keeps extra state, query_seen" in str(refusal(fake_tensorrt, node))
