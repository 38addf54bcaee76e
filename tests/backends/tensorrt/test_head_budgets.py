"""Budgets of KV heads on TensorRT, on fakes of TensorRT and CUDA: a ragged node is one plugin.

If the plugin does not support a ragged node, it becomes a node for each KV head.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.graphs import CACHES, for_tensorrt, plugin_refusal
from kvexport.backends.tensorrt.plugin import RAGGED_ATTENTION, RAGGED_MERGE, RAGGED_OPERATORS, refusal, register
from kvexport.cache import LayerGeometry
from kvexport.cache_planning import plan_cache
from kvexport.commands.app import app
from kvexport.errors import EnvironmentProblem
from kvexport.export.graph.graphs import merge_model
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from tests.support import fake_tensorrt
from tests.support.tensorrt_artifacts import engines, generated
from tests.support.tensorrt_walk import attribute, graphs, problems
from tests.support.tiny_model import RECIPE

ALLOCATION = {"kind": "listed", "shares": [[0.5, 1.5], [1.25, 0.75]]}


@pytest.fixture(scope="module")
def heads(tiny_checkpoint: Path) -> Path:
    """An artifact of the tiny Llama whose four KV heads have budgets of their own."""
    cache = {**RECIPE["cache"], "allocation": ALLOCATION}
    recipe = {**RECIPE, "model": {"path": str(tiny_checkpoint)}, "cache": cache}
    return kvexport.build(Recipe.model_validate(recipe), tiny_checkpoint.parent / "heads")


def own_nodes(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == "kvexport")


def no_ragged_plugins(node: onnx.NodeProto) -> str | None:
    return "no" if node.op_type in RAGGED_OPERATORS else None


@pytest.mark.parametrize("kind", ["decoder", "merge"])
def test_a_ragged_node_is_one_plugin_or_one_for_each_head_or_none(heads: Path, kind: str) -> None:
    one, ragged = ("VoteAttention", RAGGED_ATTENTION) if kind == "decoder" else ("MergeCache", RAGGED_MERGE)
    model = graphs(heads)[kind]
    before = model.SerializeToString(deterministic=True)
    expected: dict[Any, tuple[dict[str, int], dict[str, str]]] = {
        (lambda _: None): ({ragged: 2}, {ragged: ""}),
        no_ragged_plugins: ({one: 4}, {ragged: "no", one: ""}),
        plugin_refusal("off"): ({}, {ragged: "off", one: "off"}),
    }
    for refuses, (nodes, reasons) in expected.items():
        seen, whys = for_tensorrt(model, refuses, alias_state=True)
        assert (own_nodes(seen), whys) == (nodes, reasons)
        assert not list(problems(seen)) and not seen.functions
        for node in (node for node in seen.graph.node if node.domain == "kvexport"):
            assert attribute(node, "alias_state") == 1 and not node.overload
    assert model.SerializeToString(deterministic=True) == before


def test_the_plugin_nodes_have_their_inputs_in_the_plugins_order(heads: Path) -> None:
    seen = {kind: for_tensorrt(model, lambda _: None)[0] for kind, model in graphs(heads).items()}
    state = [value.name for value in seen["decoder"].graph.input if value.name.startswith("past_key_values")]
    attention = [node for node in seen["decoder"].graph.node if node.op_type == RAGGED_ATTENTION]
    assert [name for node in attention for name in node.input[5:]] == state
    assert [attribute(node, CACHES) for node in attention] == [2, 2]
    plan = load_manifest(heads).cache.caches
    assert [attribute(node, "budget") for node in seen["merge"].graph.node] == [
        [plan[0].budget, plan[1].budget],
        [plan[2].budget, plan[3].budget],
    ]
    # With sink logits, which are the sixth input of the ONNX node and the last of the plugin.
    model = graphs(heads)["decoder"]
    for node in model.graph.node:
        if node.op_type == RAGGED_ATTENTION:
            node.input[5] = "sinks"
    sinks = for_tensorrt(model, lambda _: None)[0]
    assert [[*node.input] for node in sinks.graph.node if node.op_type == RAGGED_ATTENTION] == [
        [*node.input, "sinks"] for node in attention
    ]


def test_an_engine_of_ragged_plugins_computes_what_onnx_runtime_does(
    heads: Path, tmp_path: Path, plugins: Path, gpu: Any
) -> None:
    artifact = engines(heads, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest.operators == {"VoteAttention": "plugin", "MergeCache": "plugin"}
    assert manifest.engines["tensorrt"]["functions"] == {}
    assert fake_tensorrt.IPluginCreatorV3One.fields["budget"][1] == [x.budget for x in manifest.cache.caches[2:]]
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


@pytest.mark.parametrize("refused", [RAGGED_ATTENTION, RAGGED_MERGE])
def test_a_ragged_node_that_the_plugin_does_not_support_runs_head_by_head(
    heads: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(fake_tensorrt.IPluginCreatorV3One, "refused", refused)
    artifact = engines(heads, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest.operators == {"VoteAttention": "plugin", "MergeCache": "plugin"}
    ((name, why),) = manifest.engines["tensorrt"]["functions"].items()
    assert name == refused and why.startswith("the plugin does not take node")
    assert f"a node for each KV head: {why}" in CliRunner().invoke(app, ["inspect", str(artifact)]).stdout
    assert generated(artifact) == generated(heads)
    with pytest.raises(EnvironmentProblem, match="does not take node"):
        engines(heads, tmp_path / "b", "plugin=always")


def test_engines_without_plugins_compute_what_onnx_runtime_does(heads: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = engines(heads, tmp_path / "a")
    assert load_manifest(artifact).operators == {"VoteAttention": "function", "MergeCache": "function"}
    assert generated(artifact) == generated(heads)


def test_the_plugin_is_not_asked_for_caches_with_extra_state(heads: Path, plugins: Path) -> None:
    register(fake_tensorrt)
    ragged = [node for model in graphs(heads).values() for node in model.graph.node if node.op_type in RAGGED_OPERATORS]
    assert {node.op_type for node in ragged} == {*RAGGED_OPERATORS}
    for node in ragged:
        assert refusal(fake_tensorrt, node) is None
        node.input.append("past_key_values.1.query_seen")
        node.output.append("present.1.query_seen")
        assert "a method that keeps extra state, query_seen" in str(refusal(fake_tensorrt, node))


def test_all_functions_of_an_operator_are_that_operator() -> None:
    """A layer with a sliding window merges by another function, which gets another name (`kvexport.ops.ragged`)."""
    geometry = [LayerGeometry(4, 2, 8, 8), LayerGeometry(4, 2, 8, 8, sliding_window=64)]
    settings = ["cache.allocation.kind=listed", "cache.allocation.shares=[[1, 3], [2, 2]]", "cache.budget=24"]
    recipe = load_recipe("tiny-base", [*settings, "cache.method=streaming", "limits.max_length=128"]).recipe
    model = merge_model(plan_cache(recipe, geometry), recipe.cache.build_method(), geometry)
    assert model is not None
    assert len({function.name for function in model.functions} - {RAGGED_MERGE}) == 2
    seen, whys = for_tensorrt(model, plugin_refusal("off"))
    assert whys == {RAGGED_MERGE: "off", "MergeCache": "off"} and not list(problems(seen))
    assert own_nodes(for_tensorrt(model, no_ragged_plugins)[0]) == {"MergeCache": 4}
    assert own_nodes(for_tensorrt(model, lambda _: None)[0]) == {RAGGED_MERGE: 2}
