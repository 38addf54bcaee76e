"""Tests of the names of nodes and values in ONNX files, which viewers show."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from kvexport.export.graph.names import name_nodes
from kvexport.ops.names import name_by_operators

# The names that torch's exporter makes up: val_12, node_Cos_3, getitem_24, add_4, vote_attention_1__5.
MADE_UP = re.compile(r"(val|node|getitem|sym)_.*|[a-z]\w*_\d+")


def names(graph: onnx.GraphProto | onnx.FunctionProto) -> list[str]:
    """Return the names of all nodes and of the values that they compute."""
    return [name for node in graph.node for name in (node.name, *node.output) if name]


def test_nodes_and_values_have_the_names_of_modules_and_operators(tiny_artifact: Path) -> None:
    graph = onnx.load(tiny_artifact / "decoder.onnx", load_external_data=False).graph
    named = {node.name: node for node in graph.node}
    assert len(named) == len(graph.node)
    block = "model.layers.0"
    attention = f"{block}.self_attn"
    expected = [
        "lm_head.Gather", f"{attention}.q_proj+k_proj+v_proj", f"{block}.VoteAttention", f"{attention}.o_proj",
        f"{block}.mlp.up_proj+gate_proj", f"{block}.mlp.down_proj", "lm_head",
    ]  # fmt: skip
    assert [name for name in named if name in expected] == expected
    assert list(named[expected[1]].output) == [f"{attention}.{name}_proj" for name in "qkv"]
    assert list(named[expected[2]].output[:2]) == [f"{block}.VoteAttention", "present.0.key"]
    constants = [value.name for value in graph.initializer if not value.external_data]
    assert constants and all(re.fullmatch(r"(int64|float)\.[\w.+-]+", name) for name in constants)


@pytest.mark.parametrize("file", ["decoder.onnx", "merge.onnx", "top_logits.onnx"])
def test_no_name_is_made_up_by_the_exporter(tiny_artifact: Path, file: str) -> None:
    model = onnx.load(tiny_artifact / file, load_external_data=False)
    for part in (model.graph, *(function for function in model.functions if function.name != "Linear")):
        assert not [name for name in names(part) if MADE_UP.fullmatch(name)]


def test_names_stay_unique_and_inputs_and_outputs_keep_theirs() -> None:
    text = """<ir_version: 11, opset_import: ["": 23]>
    g (float[N] Relu, float[N] x) => (float[N] y) <float[1] val_2 = {1.5}, float[1] other = {1.5}> {
        add_1 = Add (x, val_2)
        add_2 = Add (add_1, other)
        val_3 = Relu (add_2)
        y = Mul (val_3, Relu)
    }"""
    for rename in (name_by_operators, name_nodes):
        model = ir.from_onnx_text(text)
        before = np.asarray(model.graph.initializers["other"].const_value)
        rename(model.graph)
        assert [value.name for node in model.graph for value in node.outputs] == ["Add", "Add.2", "Relu.2", "y"]
        assert list(model.graph.initializers) == ["float.1.5", "float.1.5.2"]
        assert np.array_equal(model.graph.initializers["float.1.5.2"].const_value, before)
        onnx.checker.check_model(ir.to_proto(model))
