"""The graphs of an artifact as TensorRT's parser is to see them.

The parser knows functions by their names alone, so that of several overloads the first would stand for all, and it
fixes every shape before it sees a value. So nodes that a plugin takes lose their functions, and all others are written
out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvexport.backends.tensorrt.plugin import NAMESPACE, OPERATORS

if TYPE_CHECKING:
    import onnx

# Of MergeCache's function: rows that leave, and what gives their number at the most, the capacity less the budget.
LEAVING, MOST_LEAVING = "leaving_rows", "kv_rest"


def for_tensorrt(
    model: onnx.ModelProto, refusal: Callable[[onnx.NodeProto], str | None]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of `model` for the parser, and why each operator that it holds does not run as a plugin ("" where it
    does).

    refusal: why the plugin would not take a node, None where it does; of an operator the plugin takes every node or
        none is one.
    """
    import onnx
    from onnx import inliner

    whys: dict[str, str] = {}
    for node in model.graph.node:
        if node.domain == NAMESPACE and node.op_type in OPERATORS:
            whys[node.op_type] = whys.get(node.op_type) or refusal(node) or ""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.functions[:]
    for function in model.functions:
        if function.domain != NAMESPACE or whys.get(function.name, "no plugin"):
            copy.functions.append(with_static_rows(function) if function.name == "MergeCache" else function)
    for node in copy.graph.node:
        if node.domain == NAMESPACE and whys.get(node.op_type) == "":
            node.overload = ""
    return inliner.inline_local_functions(copy), whys


def with_static_rows(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """MergeCache's function, its other rows of `kvexport.ops.merge_cache.rows_of`: as many may leave as there is slack,
    whatever the votes. Rows beyond those that are over the budget are of empty slots, so it means the same; its shapes
    do not depend on values."""
    import onnx

    copy = onnx.FunctionProto()
    copy.CopyFrom(function)
    for node in copy.node:
        if LEAVING in node.output:
            node.input[:] = [MOST_LEAVING]
    needed = set(copy.output)
    kept = []
    for node in reversed(copy.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    del copy.node[:]
    copy.node.extend(reversed(kept))
    return copy


def plugin_refusal(reason: str) -> Callable[[onnx.NodeProto], str]:
    """A `refusal` of every node, for where there is no plugin."""
    return lambda _: reason


def operators_of(whys: Mapping[str, str], has_merge: bool) -> dict[str, str | None]:
    """For the manifest: what runs each operator, None for one that the artifact does not need."""
    found: dict[str, str | None] = {name: "function" if whys.get(name) else "plugin" for name in OPERATORS}
    return found if has_merge else {**found, "MergeCache": None}
