"""The graphs that TensorRT's parser reads have only plugins and operators that TensorRT documents."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.graphs import (
    EVICTED,
    HEADS_MERGE,
    MOST_EVICTED,
    for_tensorrt,
    plugin_refusal,
    with_static_rows,
)
from kvexport.errors import KvexportError
from tests.support.tensorrt_walk import DOCUMENTED, OPERATORS, graphs, problems


def taken(_: onnx.NodeProto) -> None:
    """Accept every node as a plugin."""


@pytest.mark.parametrize("plugin", [True, False])
def test_every_node_of_the_tiny_recipe_is_one_that_tensorrt_takes(tiny_artifact: Path, plugin: bool) -> None:
    for model in graphs(tiny_artifact).values():
        seen, whys = for_tensorrt(model, taken if plugin else plugin_refusal("off"))
        assert not list(problems(seen))
        own = Counter(node.op_type for node in seen.graph.node if node.domain == "kvexport")
        assert own == (dict.fromkeys(whys, 2) if plugin else {})
        assert not seen.functions
        assert whys == dict.fromkeys(whys, "" if plugin else "off")


def test_without_the_other_rows_a_shape_would_depend_on_the_votes(tiny_artifact: Path) -> None:
    model = onnx.inliner.inline_local_functions(graphs(tiny_artifact)["merge"])
    assert any("depends on values" in problem for problem in problems(model))


def test_functions_of_one_name_and_several_overloads_are_all_written_out() -> None:
    node, opsets = onnx.helper.make_node, [onnx.helper.make_opsetid("", 23)]
    bodies = {"sum": node("Add", ["x", "x"], ["y"]), "product": node("Mul", ["x", "x"], ["y"])}
    functions = [
        onnx.helper.make_function("kvexport", "VoteAttention", ["x"], ["y"], [body], opsets, overload=name)
        for name, body in bodies.items()
    ]
    nodes = [node("VoteAttention", ["x"], ["a"], domain="kvexport", name="first", overload="sum")]
    nodes += [node("VoteAttention", ["a"], ["y"], domain="kvexport", name="second", overload="product")]
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    graph = onnx.helper.make_graph(nodes, "g", [x], [y])
    model = onnx.helper.make_model(
        graph, functions=functions, opset_imports=[*opsets, onnx.helper.make_opsetid("kvexport", 1)], ir_version=11
    )
    seen, _ = for_tensorrt(model, plugin_refusal("off"))
    assert [n.op_type for n in seen.graph.node] == ["Add", "Mul"]
    session = ort.InferenceSession(seen.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.array([1.0, 3.0], dtype=np.float32)})[0].tolist() == [4.0, 36.0]
    plugins, _ = for_tensorrt(model, taken)
    assert [(n.op_type, n.overload) for n in plugins.graph.node] == [("VoteAttention", "")] * 2


def test_where_the_plugin_refuses_a_node_none_of_its_operator_runs_there(tiny_artifact: Path) -> None:
    model = graphs(tiny_artifact)["merge"]
    first = model.graph.node[0].name
    seen, whys = for_tensorrt(model, lambda node: "no" if node.name == first else None)
    assert whys == {"MergeCache": "no"}
    assert not [node for node in seen.graph.node if node.domain == "kvexport"]


def test_the_graph_given_is_left_as_it_was(tiny_artifact: Path) -> None:
    model = graphs(tiny_artifact)["merge"]
    before = model.SerializeToString(deterministic=True)
    for_tensorrt(model, taken)
    for_tensorrt(model, plugin_refusal("off"))
    assert model.SerializeToString(deterministic=True) == before


def test_static_rows_read_no_votes(tiny_artifact: Path) -> None:
    function = next(f for f in graphs(tiny_artifact)["merge"].functions if f.name.startswith(HEADS_MERGE))
    fixed = with_static_rows(function)
    (evicted,) = [node for node in fixed.node if EVICTED in node.output]
    assert list(evicted.input) == [MOST_EVICTED]
    assert len(fixed.node) < len(function.node)
    produced = {name for node in fixed.node for name in node.output} | set(fixed.input)
    assert all(name in produced for node in fixed.node for name in node.input if name)
    evicted.output[:] = ["other"]
    with pytest.raises(KvexportError, match="has no evicted_rows"):
        with_static_rows(fixed)


@pytest.mark.parametrize("used", [0, 5, 32, 33, 40, 48])
def test_static_rows_mean_the_same(tiny_artifact: Path, used: int) -> None:
    """The second sequence uses half as many slots."""
    state = load_manifest(tiny_artifact, verify=False).cache
    model = graphs(tiny_artifact)["merge"]
    fixed, _ = for_tensorrt(model, plugin_refusal("off"))
    rng = np.random.default_rng(used)
    feed = {}
    for name, _, layer, kind in state.state_names():
        shape = layer.shapes(2)[kind]
        place = np.concatenate([np.arange(slots) for slots in layer.capacity])
        held = place < np.array([[used], [used // 2]])
        if kind == "position":
            array = np.broadcast_to(place, shape) * held
        elif kind == "votes":
            array = rng.uniform(0.5, 3.0, shape) * held
        else:
            array = rng.standard_normal(shape)
        feed[name] = array.astype(layer.dtypes()[kind])
    sessions = [ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]) for m in (model, fixed)]
    one, other = ({o.name: x for o, x in zip(s.get_outputs(), s.run(None, feed), strict=True)} for s in sessions)
    assert one.keys() == other.keys()
    for name, array in one.items():
        # The contents of empty slots are arbitrary.
        used_slots = one[f"{name.rsplit('.', 1)[0]}.votes"] > 0
        assert used_slots.sum() == 2 * (min(used, 32) + used // 2)
        if name.endswith(".score"):
            used_slots = np.broadcast_to(used_slots[:, None], array.shape)
        assert np.array_equal(array[used_slots], other[name][used_slots]), name
        if name.endswith(".votes"):
            assert np.array_equal(array, other[name])


def test_the_list_of_operators_names_its_source() -> None:
    assert "onnx-tensorrt" in DOCUMENTED["source"]
    assert len(DOCUMENTED["supported"]) == len(set(DOCUMENTED["supported"])) > 150
    assert {"MatMul", "RotaryEmbedding", "RMSNormalization", "ScatterND", "GatherND", "TopK"} <= OPERATORS
    assert not {"NonExistent", "Unique", "Compress", "Bernoulli"} & OPERATORS


def test_nodes_that_tensorrt_does_not_support_are_listed() -> None:
    def model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
        info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
        axes = numpy_helper.from_array(np.array([0]), "axes")
        return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [info], [info], [axes]))

    node = onnx.helper.make_node
    assert "not documented" in next(problems(model(node("Unique", ["x"], ["y"]))))
    assert "no plugin" in next(problems(model(node("Other", ["x"], ["y"], domain="kvexport"))))
    counted = [node("ReduceSum", ["x", "axes"], ["s"]), node("ConstantOfShape", ["s"], ["y"])]
    assert "depends on values" in next(problems(model(*counted)))
    measured = [
        node("Shape", ["x"], ["s"]),
        node("ConstantOfShape", ["s"], ["y"]),
        node("ReduceSum", ["x", "axes"], ["z"]),
    ]
    assert not list(problems(model(*measured)))
    assert "not constant" in next(problems(model(node("Shape", ["x"], ["s"]), node("ReduceSum", ["x", "s"], ["y"]))))
    assert "reduction" in next(problems(model(node("ScatterND", ["x", "x", "x"], ["y"], reduction="add"))))
    assert "not sorted" in next(problems(model(node("TopK", ["x", "axes"], ["a", "b"], sorted=0))))
