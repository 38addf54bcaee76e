"""Tests of budgets of single KV heads."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.graphs import for_tensorrt
from kvexport.engine.lanes import Lanes
from kvexport.export.build import build, read_model
from kvexport.plan.planner import plan_cache
from kvexport.recipe.load import load_recipe
from kvexport.report import render_text
from kvexport.validate.comparison import LockedBackend
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
    text_alone = SimpleNamespace(manifest=SimpleNamespace(images=None))
    uncompared: Any = SimpleNamespace(engine=text_alone, decoded=lambda *_: None, merged=lambda *_: None)
    outputs = []
    for shares in (None, "[[1, 1.0001], [1, 1]]"):
        reference.plan = plan_cache(recipe_of(shares), shape.geometry)
        backend = LockedBackend(uncompared, reference, reference.plan, 2)
        lanes = Lanes(backend, reference.plan, 2, prefill_chunk=16, merge_every=8)
        outputs.append([lanes.append([t[i : i + 16] for t in tokens], prefill=True) for i in range(0, 64, 16)])
    for together, apart in zip(*outputs, strict=True):
        np.testing.assert_allclose(apart, together, rtol=1e-4, atol=1e-4)


def test_an_engine_whose_heads_have_budgets_of_their_own_is_pytorchs(tmp_path: Path) -> None:
    path = build(recipe_of(UNEQUAL), tmp_path / "heads", name="heads")
    manifest = load_manifest(path)
    assert (manifest.model.layers, manifest.model.query_heads) == (2, (4, 4))
    assert [layer.budget for layer in manifest.cache.caches] == [(14, 34), (29, 19)]
    result = validate_artifact(path, length=48)
    assert result.passed and result.in_place_identical and result.head_merges > 10
    assert re.search(r"budget, slots of a KV head +14 to 34", render_text(sections(result)))
    result.note(Mismatch(0, "merge", 1, "key", 1.0))
    assert "differs from PyTorch: layer 1, step 0 (merge), tensor key" in result.problem
    for file, operator in (("decoder.onnx", "VoteAttention"), ("merge.onnx", "MergeCache")):
        graph = onnx.load(path / file, load_external_data=False)
        for model in (graph, for_tensorrt(graph, taken)[0]):
            nodes = [node for node in model.graph.node if node.op_type == operator]
            assert len(nodes) == 2 and not any("Heads" in node.op_type for node in model.graph.node)
            assert [list(a.ints) for node in nodes for a in node.attribute if a.name == "capacity"] == [
                list(layer.capacity) for layer in manifest.cache.caches
            ]


def taken(_: onnx.NodeProto) -> None:
    """Accept every node as a TensorRT plugin."""
