"""Packed weights in the graphs that TensorRT's parser reads: blocks of int4, whose scales are above 0."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.graphs import for_tensorrt, plugin_refusal
from kvexport.backends.tensorrt.weights import require_taken
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.weights.specs import packed_formats, weight_notes, weight_specs
from kvexport.recipe.fields import Recipe
from tests.export.test_quantized import AWQ
from tests.support import models
from tests.support.quantized_files import awq, quantized
from tests.support.tensorrt_artifacts import engines
from tests.support.tensorrt_walk import attribute, problems
from tests.support.tiny_model import RECIPE

ROUNDED = {"bits": 4, "group": 64}
TENSORRT = {"name": "tensorrt"}


def recipe_of(checkpoint: Path, weights: dict[str, Any], backend: str = "tensorrt") -> Recipe:
    fields = models.make_recipe(checkpoint, dtype="float16", limits={"max_length": 128}).model_dump()
    return Recipe.model_validate({**fields, "weights": weights, "backend": {"name": backend}})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with 64 inputs in each product, except for one projection of each layer with 96."""
    return models.save_checkpoint(tmp_path_factory.mktemp("weights") / "checkpoint", models.llama())


@pytest.fixture(scope="module")
def artifact(checkpoint: Path) -> Path:
    return build(recipe_of(checkpoint, ROUNDED), checkpoint.parent / "artifact", graphs_only=True)


def decoder_of(artifact: Path) -> onnx.ModelProto:
    return onnx.load(artifact / load_manifest(artifact).graphs.decoder, load_external_data=False)


@pytest.mark.parametrize("refusal", [lambda node: None, plugin_refusal("off")], ids=["plugins", "functions"])
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


@pytest.mark.parametrize(("weights", "message"), [
    ({"bits": 4, "group": 32}, "int4, groups of 32, and TensorRT takes only groups of 64 and 128"),
    ({"bits": 8, "group": 64}, "int8, groups of 64, and TensorRT takes only int4"),
    ({"bits": 4, "group": 64, "symmetric": False}, "uint4, groups of 64, zero points, and TensorRT takes"),
])  # fmt: skip
def test_another_rounding_is_refused(checkpoint: Path, weights: Any, message: str) -> None:
    shape = read_model(recipe := recipe_of(checkpoint, weights))
    with pytest.raises(UsageError, match=message) as caught:
        weight_specs(shape.checkpoint, shape.model, recipe)
    assert "--set weights.group=128" in caught.value.fix


def test_weights_that_stay_in_floats_are_printed(checkpoint: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    shape = read_model(recipe := recipe_of(checkpoint, ROUNDED))
    specs = weight_specs(shape.checkpoint, shape.model, recipe)
    assert weight_notes(shape.checkpoint, shape.model, recipe, specs)[:3] == [
        "kept in floats, because TensorRT does not pick rows of packed weights: model.embed_tokens.weight [100, 64]",
        "kept in floats, because TensorRT takes only groups of 64 and 128 inputs: model.layers.0.mlp.down_proj.weight "
        "[64, 96] and 1 more",
        "kept in floats, because TensorRT takes only int4, without zero points and minima: lm_head.weight [100, 64]",
    ]
    quantized(tiny_checkpoint, tmp_path / "q", AWQ, awq)
    fields = {**RECIPE, "model": {"path": str(tmp_path / "q")}}
    recipe = Recipe.model_validate({**fields, "backend": TENSORRT})
    shape = read_model(recipe)
    specs = weight_specs(shape.checkpoint, shape.model, recipe)
    assert packed_formats(specs) == {}
    assert weight_notes(shape.checkpoint, shape.model, recipe, specs) == [
        "uint4, groups of 16, zero points, cast to float16, because TensorRT takes only int4, without zero "
        "points and minima: model.layers.0.self_attn.q_proj.weight and 13 more"
    ]


@pytest.mark.parametrize("head", ["same", 8])
def test_an_artifact_with_a_packed_embedding_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, plugins: Path, head: Any
) -> None:
    weights = {**ROUNDED, "head": head}
    artifact_of_another = build(recipe_of(checkpoint, weights, "onnxruntime"), tmp_path / "a")
    tensor = {"same": "rows", 8: "weight"}[head]
    message = rf"embed_tokens\.{tensor} has u?int8 numbers: TensorRT does not pick rows of packed weights"
    with pytest.raises(UsageError, match=message) as refused:
        engines(artifact_of_another, tmp_path / "engines")
    assert "without --from" in refused.value.fix


def test_an_artifact_with_other_blocks_is_refused_by_name(checkpoint: Path, tmp_path: Path, plugins: Path) -> None:
    weights = {**ROUNDED, "group": 32, "head": "float"}
    artifact_of_another = build(recipe_of(checkpoint, weights, "onnxruntime"), tmp_path / "a")
    with pytest.raises(UsageError, match=r"q_proj\.weight has int4 numbers in groups of 32: TensorRT takes only"):
        engines(artifact_of_another, tmp_path / "engines")


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_not_above_0_are_refused(scale: float, tmp_path: Path) -> None:
    weight = onnx.helper.make_tensor("w", TensorProto.INT4, [2, 64], [1] * 128)
    scales = numpy_helper.from_array(np.array([[0.5], [scale]], np.float16), "s")
    node = onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["y"], axis=1, block_size=64)
    graph = onnx.helper.make_graph([node], "g", [], [], [weight, scales])
    with pytest.raises(UsageError, match="w has int4 numbers in groups of 64: TensorRT takes only scales above 0"):
        require_taken(onnx.helper.make_model(graph), tmp_path)
