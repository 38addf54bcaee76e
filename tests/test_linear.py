"""Linear: which products become one, and that kernel, function and ``torch.nn.functional.linear`` say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper

from kvexport.build.artifact import load_manifest
from kvexport.native import VARIABLE, library
from kvexport.ops.linear import linear_function, use_linear
from kvexport.runtime.engine import load

TYPES = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}


def model_of(dtype: str, shape: list[Any], weight: list[int], function: bool) -> onnx.ModelProto:
    """One Linear, of a weight that is an input."""
    kind = TYPES[dtype]
    value = helper.make_tensor_value_info
    node = helper.make_node("Linear", ["input", "weight"], ["output"], domain="kvexport")
    inputs = [value("input", kind, shape), value("weight", kind, weight)]
    graph = helper.make_graph([node], "g", inputs, [value("output", kind, None)])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    functions = [linear_function()] if function else []
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11)


def session(model: onnx.ModelProto, native: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    if native:
        options.register_custom_ops_library(str(library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def needs_library() -> None:
    if library() is None:
        pytest.skip("not reached: the native operators are not built (make native)")


# Rows below, at and above a tile, sizes that fill no vector, and enough of them for many tasks.
SIZES = [(1, 1, 64, 48), (1, 1, 3, 1), (1, 3, 31, 7), (2, 2, 257, 130), (3, 11, 96, 515), (1, 300, 1000, 70)]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "function"])
def test_it_is_what_pytorch_computes(dtype: str, native: bool) -> None:
    if native:
        needs_library()
    rng = np.random.default_rng(0)
    run = session(model_of(dtype, ["B", "T", "K"], ["N", "K"], not native), native)  # type: ignore[list-item]
    for batch, tokens, inputs, outputs in SIZES:
        x = rng.standard_normal((batch, tokens, inputs)).astype(dtype)
        w = rng.standard_normal((outputs, inputs)).astype(dtype)
        expected = torch.nn.functional.linear(torch.from_numpy(x).double(), torch.from_numpy(w).double()).numpy()
        (found,) = run.run(None, {"input": x, "weight": w})
        error = np.abs(found.astype(np.float64) - expected).max() / np.sqrt(inputs)
        assert found.shape == expected.shape and found.dtype == x.dtype
        assert error < (2e-3 if dtype == "float16" else 2e-6), (batch, tokens, inputs, outputs)


def test_no_rows_give_no_rows() -> None:
    needs_library()
    run = session(model_of("float32", ["T", 8], [4, 8], False), True)
    assert run.run(None, {"input": np.zeros((0, 8), np.float32), "weight": np.zeros((4, 8), np.float32)})[0].shape == (0, 4)


def test_sizes_that_do_not_fit_are_refused() -> None:
    needs_library()
    with pytest.raises(Exception, match=r"Linear: input \[\?, 8\] does not fit a weight \[4, 9\]"):
        session(model_of("float32", ["T", 8], [4, 9], False), True)
    run = session(model_of("float32", ["T", "K"], ["N", "M"], False), True)  # type: ignore[list-item]
    with pytest.raises(Exception, match="does not fit a weight"):
        run.run(None, {"input": np.zeros((2, 8), np.float32), "weight": np.zeros((4, 9), np.float32)})


def test_only_products_with_transposed_float16_weights_are_replaced() -> None:
    text = """<ir_version: 11, opset_import: ["": 23]>
    g (float16[1,4] x, float16[4,4] y) => (float16[4,4] used, float16[1,4] c, float16[1,4] d, float16[1,4] e)
    {
        t = Transpose <perm = [1, 0]> (w)
        c = MatMul (x, t)
        used = Transpose <perm = [1, 0]> (shared)
        d = MatMul (x, used)
        z = Transpose <perm = [1, 0]> (y)
        e = MatMul (x, z)
        v = Transpose <perm = [1, 0]> (wide)
    }"""
    graph = onnx.parser.parse_model(text).graph
    for name, dtype in {"w": "float16", "shared": "float16", "wide": "float32"}.items():
        graph.initializer.append(numpy_helper.from_array(np.zeros((4, 4), dtype), name))
    assert use_linear(graph)
    assert [node.op_type for node in graph.node] == ["Linear", "Transpose", "Linear", "Transpose", "MatMul", "Transpose"]
    assert list(graph.node[0].input) == ["x", "w"] and list(graph.node[2].input) == ["x", "shared"]
    del graph.initializer[:]
    assert not use_linear(graph)


def test_an_engine_of_float16_says_the_same_with_and_without_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_library()
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    recipe = models.make_recipe(checkpoint, dtype="float16", limits={"max_length": 512})
    path = models.build_shared(recipe, tmp_path / "artifact")
    decoder = onnx.load(path / load_manifest(path, verify=False)["graphs"]["decoder"], load_external_data=False)
    counts = [node.op_type for node in decoder.graph.node]
    layers = counts.count("VoteAttention")
    assert counts.count("Linear") == 7 * layers + 1 and "MatMul" not in counts
    logits = []
    for operators in ("", "off"):
        monkeypatch.setenv(VARIABLE, operators)
        lanes = load(path).lanes(2)
        lanes.prefill([np.arange(40) % 50 + 3, np.arange(7) + 3])
        logits.append(lanes.append([np.array([5]), np.array([6])]).copy())
    assert np.abs(logits[0] - logits[1]).max() < 0.02 * np.abs(logits[1]).max()
