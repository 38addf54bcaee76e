"""The graphs of an artifact as TensorRT's parser is to see them.

The parser knows functions by their names alone, so that of several overloads the first would stand for all, and it
fixes every shape before it sees a value. So nodes that a plugin takes lose their functions, and all others are written
out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvexport.backends.tensorrt.plugin import NAMESPACE, OPERATORS
from kvexport.backends.tensorrt.weights import with_typed_weights
from kvexport.errors import KvexportError

if TYPE_CHECKING:
    import onnx

# A field of both plugins (plugins/bindings/tensorrt/operators.h).
ALIAS_STATE = "alias_state"
# Of MergeCache's function: its evicted rows, and their largest number, the capacity less the budget.
EVICTED, MOST_EVICTED = "evicted_rows", "kv_rest"


def for_tensorrt(
    model: onnx.ModelProto, refusal: Callable[[onnx.NodeProto], str | None], *, alias_state: bool = False
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of `model` for the parser, and why each operator that it holds does not run as a plugin ("" where it
    does).

    refusal: why the plugin would not take a node, None where it does; of an operator the plugin takes every node or
        none is one.
    alias_state: whether plugins declare that a present state tensor is its past one. TensorRT then needs its preview
        feature ALIASED_PLUGIN_IO_10_03, and refuses the network without.
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
            node.attribute.append(onnx.helper.make_attribute(ALIAS_STATE, int(alias_state)))
    return with_typed_weights(inliner.inline_local_functions(copy)), whys


def with_static_rows(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """MergeCache's function with as many evicted rows as there is slack, whatever the votes (the rows of
    `kvexport.ops.merge_cache.rows_of`). Rows beyond those that are over the budget are of empty slots, so it means the
    same; its shapes do not depend on values. Raises KvexportError where the function has no evicted rows by that
    name."""
    import onnx

    copy = onnx.FunctionProto()
    copy.CopyFrom(function)
    found = [node for node in copy.node if EVICTED in node.output]
    if not found or not any(MOST_EVICTED in node.output for node in copy.node):
        raise KvexportError(
            f"the function of MergeCache has no {EVICTED} or no {MOST_EVICTED}, so that its shapes depend on values",
            "build the artifact again; if it stays, report it with kvexport doctor",
        )
    for node in found:
        node.input[:] = [MOST_EVICTED]
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
