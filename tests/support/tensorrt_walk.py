"""Checks of a graph against TensorRT's documented list of operators."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from kvexport.backends.tensorrt.engines import PLANS
from kvexport.backends.tensorrt.graphs import for_tensorrt, plugin_refusal
from kvexport.backends.tensorrt.plugin import OPERATORS as PLUGINS

DOCUMENTED = json.loads((Path(__file__).parent / "tensorrt_operators.json").read_text())
OPERATORS = {*DOCUMENTED["supported"], *DOCUMENTED["added"]}
# Inputs that define a shape, by operator.
SHAPES = {
    "Reshape": [1], "Expand": [1], "ConstantOfShape": [0], "Slice": [1, 2, 3, 4], "Range": [0, 1, 2], "TopK": [1],
    "Tile": [1], "OneHot": [1], "Split": [1], "Squeeze": [1], "Unsqueeze": [1], "Pad": [1], "Resize": [2, 3],
    "CumSum": [1],
}  # fmt: skip
REDUCTIONS = {
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceLogSumExp",
}  # fmt: skip


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    matching = [onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name]
    return matching[0] if matching else default


def problems(model: onnx.ModelProto) -> Iterator[str]:
    """Return the places where the graph violates TensorRT's list of operators, bodies of loops included."""
    yield from graph_problems(model.graph, set(), set())


def graph_problems(graph: onnx.GraphProto, by_value: set[str], constant: set[str]) -> Iterator[str]:
    by_value = by_value | {value.name for value in graph.input}
    constant = constant | {value.name for value in graph.initializer}
    for node in graph.node:
        where = f"{node.op_type} {node.name}"
        own = node.domain == "kvexport"
        if own and node.op_type not in PLUGINS:
            yield f"{where} is of domain kvexport and no plugin"
        if not own and (node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS):
            yield f"{where} is not documented"
        for i in SHAPES.get(node.op_type, []):
            if i < len(node.input) and node.input[i] in by_value:
                yield f"{where} has a shape that depends on values: {node.input[i]}"
        if node.op_type in REDUCTIONS and len(node.input) > 1 and node.input[1] not in constant:
            yield f"{where} reduces axes that are not constant"
        if node.op_type == "ScatterND" and attribute(node, "reduction", b"none") != b"none":
            yield f"{where} has a reduction"
        if node.op_type == "TopK" and attribute(node, "sorted", 1) != 1:
            yield f"{where} is not sorted"
        if node.op_type == "LayerNormalization" and len([x for x in node.output if x]) > 1:
            yield f"{where} has more than one output"
        for body in (a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH):
            yield from graph_problems(body, by_value, constant)
        if node.op_type == "Constant":
            constant.update(node.output)
        elif node.op_type not in ("Shape", "Size") and by_value.intersection(node.input):
            by_value.update(node.output)


def graphs(artifact: Path) -> dict[str, onnx.ModelProto]:
    paths = {kind: artifact / f"{kind}.onnx" for kind in PLANS}
    return {kind: onnx.load(path, load_external_data=False) for kind, path in paths.items() if path.exists()}


def artifact_problems(artifact: Path) -> list[str]:
    """Return the problems of an artifact's graphs, with plugins for the operators and with functions for them."""
    refusals = (lambda _: None, plugin_refusal("off"))
    return [
        p
        for model in graphs(artifact).values()
        for refusal in refusals
        for p in problems(for_tensorrt(model, refusal)[0])
    ]
