"""Tests of budgets of single KV heads, each of which has its own cache."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.graphs import for_tensorrt
from kvexport.cache import LayerGeometry
from kvexport.cache_planning import plan_cache
from kvexport.engine.lanes import Lanes
from kvexport.export.build import build, read_model
from kvexport.export.graph.heads import put_caches_of_heads
from kvexport.recipe.load import load_recipe
from kvexport.report.text import render_text
from kvexport.schema.state import STATE
from kvexport.validate.backend import ReferenceBackend
from kvexport.validate.reference import TorchReference
from kvexport.validate.result import Mismatch
from kvexport.validate.runner import validate_artifact
from kvexport.validate.sections import sections
from tests.support.recipes import method_settings

SETTINGS = ["cache.budget=24", "export.prefill_chunk=16", "limits.max_length=128", "limits.max_batch=2"]
UNEQUAL = "[[0.6, 1.4], [1.2, 0.8]]"


def recipe_of(shares: str | None = None) -> Any:
    listed = [] if shares is None else ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"]
    return load_recipe("tiny-base", [*method_settings("ballot"), *SETTINGS, *listed]).recipe


def test_equal_shares_of_heads_equal_a_budget_of_the_layer() -> None:
    rng = np.random.default_rng(3)
    tokens = [rng.integers(3, 300, size=n) for n in (70, 61)]
    recipe = recipe_of()
    shape = read_model(recipe)
    reference = TorchReference(shape.checkpoint, shape.plan, shape.geometry, recipe.cache.build_method(), recipe)
    outputs = []
    for shares in (None, "[[1, 1], [1, 1]]"):
        reference.plan = plan_cache(recipe_of(shares), shape.geometry)
        backend = ReferenceBackend(reference, reference.plan, 2)
        lanes = Lanes(backend, reference.plan, 2, prefill_chunk=16, merge_every=8)
        outputs.append([lanes.append([t[i : i + 16] for t in tokens], prefill=True) for i in range(0, 64, 16)])
    assert [len(plan_cache(recipe_of(s), shape.geometry).caches) for s in (None, "[[1, 1], [1, 1]]")] == [2, 4]
    for together, apart in zip(*outputs, strict=True):
        np.testing.assert_allclose(apart, together, rtol=1e-4, atol=1e-4)


def test_an_engine_whose_heads_have_budgets_of_their_own_is_pytorchs(tmp_path: Path) -> None:
    path = build(recipe_of(UNEQUAL), tmp_path / "heads", name="heads")
    manifest = load_manifest(path)
    assert (manifest.model.layers, manifest.model.query_heads) == (2, (2, 2, 2, 2))
    assert [layer.budget for layer in manifest.cache.caches] == [14, 34, 29, 19]
    result = validate_artifact(path, length=48)
    assert result.passed and result.in_place_identical and result.head_merges > 10
    assert "budget, slots per cache" in render_text(sections(result))
    result.note(Mismatch(0, "merge", 3, "key", 1.0))
    assert "differs from PyTorch: cache 3, step 0 (merge), tensor key" in result.problem
    for file, operator in (("decoder.onnx", "VoteAttention"), ("merge.onnx", "MergeCache")):
        graph = onnx.load(path / file, load_external_data=False)
        counts = [
            Counter(node.op_type for node in model.graph.node) for model in (graph, for_tensorrt(graph, taken)[0])
        ]
        assert [x[f"Ragged{operator}"] for x in counts] == [2, 2]
        assert [x[operator] for x in counts] == [0, 0]


def taken(_: onnx.NodeProto) -> None:
    """Accept every node as a TensorRT plugin."""


def test_a_layer_with_caches_of_heads_has_one_attention_node() -> None:
    geometry = [LayerGeometry(4, 2, 8, 8, sink_logits=True)]
    whole, plan = (plan_cache(recipe_of(shares), geometry) for shares in (None, "[[1, 3]]"))
    inputs = ["query", "key", "value", "position", "query_length", *(x.past(0) for x in STATE), "sinks"]
    outputs = ["read", *(x.present(0) for x in STATE)]
    node = helper.make_node("VoteAttention", inputs, ["output", *outputs[1:]], domain="kvexport", layer=0)
    read = helper.make_node("Identity", ["output"], ["read"])
    named = {x.past(0): x for x in STATE} | {x.present(0): x for x in STATE}
    shapes = {name: ["batch", *whole.caches[0].shapes(1)[x.name][1:]] for name, x in named.items()}
    expected, actual = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes.get(name)) for name in names]
        for names in (inputs, outputs)
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    model = ir.from_proto(
        helper.make_model(helper.make_graph([node, read], "layer", expected, actual), opset_imports=opsets)
    )
    put_caches_of_heads(model.graph, geometry, plan)
    attention = next(node for node in model.graph if node.op_type == "RaggedVoteAttention")
    state = [x.past(cache) for cache in range(2) for x in STATE]
    assert [x.name for x in attention.inputs if x is not None] == [*inputs[:5], "sinks", *state]
    assert [x.shape[2] for x in model.graph.inputs if x.name.endswith(".key")] == [x.capacity for x in plan.caches]
    assert [x.name for x in model.graph.outputs][:2] == ["read", "present.0.key"]
