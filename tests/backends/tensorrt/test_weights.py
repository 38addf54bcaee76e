"""Packed weights in the graphs that TensorRT's parser reads: bytes of the plugin Linear, or blocks of int4.

TensorRT dequantizes the blocks, whose scales are above 0. These tests do not run TensorRT.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from typer.testing import CliRunner

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt import plugin
from kvexport.backends.tensorrt.backend import BACKEND
from kvexport.backends.tensorrt.graphs import for_tensorrt, plugin_refusal
from kvexport.backends.tensorrt.weights import require_taken
from kvexport.commands.app import app
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.build import build, read_model
from kvexport.export.weights.specs import packed_formats, weight_notes, weight_specs
from kvexport.recipe.fields import Recipe
from tests.export.test_quantized import AWQ
from tests.support import fake_tensorrt, models
from tests.support.quantized_files import awq, quantized
from tests.support.tensorrt_artifacts import engines
from tests.support.tensorrt_walk import attribute, problems
from tests.support.tiny_model import RECIPE

ROUNDED = {"bits": 4, "group": 64, "inputs": "float"}
NEVER = {"name": "tensorrt", "tensorrt": {"plugin": "never"}}
AUTO = {"name": "tensorrt"}


def recipe_of(checkpoint: Path, weights: dict[str, Any], backend: dict[str, Any], dtype: str = "float16") -> Recipe:
    fields = models.make_recipe(checkpoint, dtype=dtype, limits={"max_length": 128}).model_dump()
    return Recipe.model_validate({**fields, "weights": weights, "backend": backend})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with 64 inputs in each product, except for one projection of each layer with 96."""
    return models.save_checkpoint(tmp_path_factory.mktemp("weights") / "checkpoint", models.llama())


@pytest.fixture(scope="module")
def artifact(checkpoint: Path) -> Path:
    """The checkpoint's graphs for TensorRT without the plugin."""
    return models.build_shared(recipe_of(checkpoint, ROUNDED, NEVER), checkpoint.parent / "artifact", graphs_only=True)


@pytest.fixture(scope="module")
def for_plugin(checkpoint: Path) -> Path:
    """The checkpoint's graphs for TensorRT with the plugin: integers of 4 bits with zero points, and a head of int8."""
    weights = {**ROUNDED, "group": 32, "symmetric": False}
    recipe = recipe_of(checkpoint, weights, AUTO, "float32")
    return models.build_shared(recipe, checkpoint.parent / "for_plugin", graphs_only=True)


def decoder_of(artifact: Path) -> onnx.ModelProto:
    return onnx.load(artifact / load_manifest(artifact).graphs.decoder, load_external_data=False)


@pytest.mark.parametrize(
    "refusal",
    [lambda node: "off" if node.op_type == "Linear" else None, plugin_refusal("off")],
    ids=["other plugins", "functions"],
)
def test_weights_are_blocks_of_int4_that_products_read(artifact: Path, refusal: Any) -> None:
    model, _ = for_tensorrt(decoder_of(artifact), refusal)
    require_taken(model, artifact)
    assert not list(problems(model))
    held = {x.name: x for x in model.graph.initializer}
    readers = {name: node for node in model.graph.node for name in node.input}
    dequantized = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    for node in dequantized:
        weight, scale = (held[name] for name in node.input)
        assert (weight.data_type, scale.data_type) == (TensorProto.INT4, TensorProto.FLOAT16)
        assert [attribute(node, x) for x in ("axis", "block_size", "output_dtype")] == [1, 64, TensorProto.FLOAT16]
        assert list(scale.dims) == [weight.dims[0], weight.dims[1] // 64]
        transposed = readers[node.output[0]]
        assert transposed.op_type == "Transpose" and attribute(transposed, "perm") == [1, 0]
        product = readers[transposed.output[0]]
        assert product.op_type == "MatMul" and product.input[1] == transposed.output[0]
    # Queries, keys, values, outputs, gate and up of two layers. 96 inputs have no blocks of this size, and the head has
    # no int4.
    assert len(dequantized) == len({node.input[0] for node in dequantized}) == 12
    assert {x.data_type for x in model.graph.initializer} & {TensorProto.UINT8, TensorProto.INT8} == set()
    assert load_manifest(artifact).model.packed == {"int4, groups of 64": 12}


def test_the_plugin_reads_every_packed_weight(for_plugin: Path) -> None:
    assert load_manifest(for_plugin).model.packed == {"int8, groups of 32": 1, "uint4, groups of 32, zero points": 14}
    model, whys = for_tensorrt(decoder_of(for_plugin), lambda _: None)
    require_taken(model, for_plugin)
    assert not list(problems(model)) and whys["Linear"] == ""
    held = {x.name: x for x in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "Linear"]
    integers = [held[name] for node in nodes for name in node.input if name in held and "Float" not in kind(held[name])]
    assert {kind(x) for x in integers} == {"Int8"} and len(integers) == 2 * 14 + 1
    assert "DequantizeLinear" not in {node.op_type for node in model.graph.node}
    assert Counter(bits for node in nodes for bits in attribute(node, "bits")) == {4: 14, 8: 1}
    written, _ = for_tensorrt(decoder_of(for_plugin), plugin_refusal("off"))
    with pytest.raises(EnvironmentProblem, match="does not run Linear: off") as refused:
        require_taken(written, for_plugin, ("off", "the fix"))
    assert refused.value.fix == "the fix"


def kind(tensor: onnx.TensorProto) -> str:
    return TensorProto.DataType.Name(tensor.data_type).title()


def test_engines_read_packed_weights_as_onnx_runtime_does(for_plugin: Path, tmp_path: Path, plugins: Path) -> None:
    artifact = engines(for_plugin, tmp_path / "a")
    assert load_manifest(artifact).operators["Linear"] == "plugin"
    shown = CliRunner().invoke(app, ["inspect", str(artifact)]).stdout
    assert re.search(r"Linear +plugin", shown), shown
    state, expected = (kvexport.load(artifact, backend=name).new_state(2) for name in ("tensorrt", "onnxruntime"))
    ids = np.random.default_rng(0).integers(0, 100, (2, 8))
    for tokens in (ids, ids[:, :1], ids[:, :1]):
        lengths = np.full((2, 1), tokens.shape[1])
        np.testing.assert_allclose(state.decode(tokens, lengths), expected.decode(tokens, lengths), atol=1e-5)


def test_a_build_without_the_plugin_is_refused_before_the_checkpoint_is_read(
    checkpoint: Path, for_plugin: Path, tmp_path: Path, gpu: Any
) -> None:
    why = "switched off by KVEXPORT_TENSORRT_PLUGIN"
    with pytest.raises(EnvironmentProblem, match=f"the recipe packs weights, which .* plugin: {why}") as refused:
        build(recipe_of(checkpoint.parent / "nowhere", ROUNDED, AUTO), tmp_path / "a")
    assert "plugins/build.py tensorrt" in refused.value.fix and "plugin=never" in refused.value.fix
    with pytest.raises(EnvironmentProblem, match="the recipe packs weights"):
        engines(for_plugin, tmp_path / "b")
    with pytest.raises(EnvironmentProblem, match="switched off by backend") as refused:
        engines(for_plugin, tmp_path / "c", "plugin=never")
    assert refused.value.fix == "--set backend.tensorrt.plugin=auto"


def test_weights_that_the_plugin_does_not_take_are_refused_by_name(
    for_plugin: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.IPluginCreatorV3One, "refused", "Linear")
    message = "uint4 numbers in groups of 32: .* does not run Linear: the plugin does not take node"
    with pytest.raises(EnvironmentProblem, match=message) as refused:
        engines(for_plugin, tmp_path / "a")
    assert refused.value.fix == plugin.BUILD


def test_a_plan_tells_how_packed_weights_run(checkpoint: Path) -> None:
    shape = read_model(recipe := recipe_of(checkpoint, ROUNDED, AUTO), weights=False)
    assert "kvexport's plugin" in BACKEND.advice(recipe, shape.plan, 1)["rounded weights"]
    assert "by TensorRT" in BACKEND.advice(recipe_of(checkpoint, ROUNDED, NEVER), shape.plan, 1)["rounded weights"]
    assert "rounded weights" not in BACKEND.advice(recipe_of(checkpoint, {}, AUTO), shape.plan, 1)


def test_the_graph_equals_the_artifact(artifact: Path, tmp_path: Path) -> None:
    model, _ = for_tensorrt(decoder_of(artifact), plugin_refusal("off"))
    shutil.copytree(artifact, tmp_path / "seen")
    original = tmp_path / "seen" / load_manifest(artifact).graphs.decoder
    seen = original.with_name("seen.onnx")
    onnx.save(model, seen)
    feeds: dict[str, Any] = {"input_ids": np.arange(6)[None], "query_length": np.array([[6]])}
    feeds["past_length"] = np.zeros((1, 1), np.int64)
    for i, layer in enumerate(load_manifest(artifact).cache.caches):
        for name, shape in layer.shapes(1).items():
            feeds[f"past_key_values.{i}.{name}"] = np.zeros(shape, layer.dtypes()[name])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # they leave roundings out
    logits = [ort.InferenceSession(str(path), options).run(["logits"], feeds)[0] for path in (original, seen)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"bits": 4, "group": 32}, "int4, groups of 32, and TensorRT takes only groups of 64 and 128"),
        ({"bits": 8, "group": 64}, "int8, groups of 64, and TensorRT takes only int4"),
        ({"bits": 4, "group": 64, "symmetric": False}, "uint4, groups of 64, zero points, and TensorRT takes"),
    ],
)
def test_a_rounding_that_needs_the_plugin_is_refused_without_it(checkpoint: Path, weights: Any, message: str) -> None:
    shape = read_model(recipe := recipe_of(checkpoint, weights, NEVER))
    with pytest.raises(UsageError, match=message) as caught:
        weight_specs(shape.checkpoint, shape.model, recipe)
    assert "--set weights.group=128" in caught.value.fix and "plugin=auto" in caught.value.fix
    recipe = recipe_of(checkpoint, weights, AUTO)
    assert packed_formats(weight_specs(shape.checkpoint, shape.model, recipe))


def test_scales_have_to_be_above_0_where_tensorrt_dequantizes_alone(checkpoint: Path) -> None:
    assert BACKEND.positive_scales(recipe_of(checkpoint, ROUNDED, NEVER))
    assert not BACKEND.positive_scales(recipe_of(checkpoint, ROUNDED, AUTO))


def test_weights_that_stay_in_floats_are_printed(checkpoint: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    shape = read_model(recipe := recipe_of(checkpoint, ROUNDED, AUTO))
    picked = "TensorRT does not pick rows of packed weights"
    assert weight_notes(shape.checkpoint, shape.model, recipe) == [
        f"kept in floats, because {picked}: model.embed_tokens.weight [100, 64]",
        "weights.group 64 does not divide the inputs of 2 weights, whose groups are smaller: of "
        "model.layers.0.mlp.down_proj.weight 32",
    ]
    recipe = recipe_of(checkpoint, ROUNDED, NEVER)
    assert weight_notes(shape.checkpoint, shape.model, recipe)[:3] == [
        "kept in floats, because TensorRT does not pick rows of packed weights: model.embed_tokens.weight [100, 64]",
        "kept in floats, because TensorRT takes only groups of 64 and 128 inputs: model.layers.0.mlp.down_proj.weight "
        "[64, 96] and 1 more",
        "kept in floats, because TensorRT takes only int4, without zero points and minima: lm_head.weight [100, 64]",
    ]
    quantized(tiny_checkpoint, tmp_path / "q", AWQ, awq)
    fields = {**RECIPE, "model": {"path": str(tmp_path / "q")}}
    recipe = Recipe.model_validate({**fields, "backend": AUTO})
    shape = read_model(recipe)
    assert packed_formats(weight_specs(shape.checkpoint, shape.model, recipe)) == {
        "uint4, groups of 16, zero points": 14
    }
    recipe = Recipe.model_validate({**fields, "backend": NEVER})
    assert packed_formats(weight_specs(shape.checkpoint, shape.model, recipe)) == {}
    assert weight_notes(shape.checkpoint, shape.model, recipe) == [
        "uint4, groups of 16, zero points, cast to float32, because TensorRT takes only int4, without zero "
        "points and minima: model.layers.0.self_attn.q_proj.weight and 13 more"
    ]


@pytest.mark.parametrize("head", ["same", 8])
def test_an_artifact_with_a_packed_embedding_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, plugins: Path, head: Any
) -> None:
    weights = {**ROUNDED, "head": head}
    artifact_of_another = models.build_shared(recipe_of(checkpoint, weights, {"name": "onnxruntime"}), tmp_path / "a")
    message = r"embed_tokens\.rows has u?int8 numbers: TensorRT does not pick rows of packed weights"
    with pytest.raises(UsageError, match=message) as refused:
        engines(artifact_of_another, tmp_path / "engines")
    assert "without --from" in refused.value.fix


def test_an_artifact_for_another_backend_is_taken_with_the_plugin(
    checkpoint: Path, tmp_path: Path, plugins: Path
) -> None:
    """With the plugin Linear, an artifact's packed weights may have scales below 0 and groups of any size."""
    weights = {**ROUNDED, "group": 32, "head": "float"}
    artifact_of_another = models.build_shared(recipe_of(checkpoint, weights, {"name": "onnxruntime"}), tmp_path / "a")
    assert load_manifest(engines(artifact_of_another, tmp_path / "engines")).operators["Linear"] == "plugin"
    with pytest.raises(
        EnvironmentProblem, match=r"q_proj\.weight has int4 numbers in groups of 32: TensorRT takes only"
    ):
        engines(artifact_of_another, tmp_path / "others", "plugin=never")


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_not_above_0_are_refused(scale: float, tmp_path: Path) -> None:
    weight = onnx.helper.make_tensor("w", TensorProto.INT4, [2, 64], [1] * 128)
    scales = numpy_helper.from_array(np.array([[0.5], [scale]], np.float16), "s")
    node = onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["y"], axis=1, block_size=64)
    graph = onnx.helper.make_graph([node], "g", [], [], [weight, scales])
    with pytest.raises(UsageError, match="w has int4 numbers in groups of 64: TensorRT takes only scales above 0"):
        require_taken(onnx.helper.make_model(graph), tmp_path)
