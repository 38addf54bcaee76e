"""The conversion of an artifact's ONNX graphs for TensorRT's parser.

The parser tells ONNX functions apart only by name, so the first of several overloads would replace the others. The
parser also fixes every tensor's shape before it knows any tensor's values. The conversion therefore removes the
functions of nodes that a plugin runs, and inlines all other functions. Linear nodes are inlined, because TensorRT
itself fuses a matrix product with the dequantization of its weight and with neighbouring nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvexport.backends.sections import default
from kvexport.backends.tensorrt.plugin import NAMESPACE, OPERATORS
from kvexport.backends.tensorrt.weights import with_typed_weights
from kvexport.errors import KvexportError

if TYPE_CHECKING:
    import onnx

# The start of the name of an ONNX function that MergeCache's functions call to merge KV heads with equal capacities and
# budgets, and two values in it: the evicted rows, and their largest number, which is capacity - budget.
HEADS_MERGE = "HeadsMergeCache_"
EVICTED, MOST_EVICTED = "evicted_rows", "kv_rest"
# Operators that TensorRT cannot run: it has no scatter that adds (for Experts), and would run a recurrence
# (LinearAttention) token by token.
REFUSED = {"Experts": "a mixture of experts", "LinearAttention": "layers with recurrent states"}


def for_tensorrt(
    model: onnx.ModelProto, refusal: Callable[[onnx.NodeProto], str | None]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return an ONNX graph for TensorRT's parser, and for each operator why it is no plugin ("" if it is one)."""
    import onnx
    from onnx import inliner

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    own = [(i, x) for i, x in enumerate(copy.graph.node) if x.domain == NAMESPACE and x.op_type in OPERATORS]
    plugins = {i: _plugin_node(node) for i, node in own}
    whys: dict[str, str] = {}
    for node in plugins.values():
        whys[node.op_type] = whys.get(node.op_type) or refusal(node) or ""
    taken = {(node.op_type, copy.graph.node[i].overload) for i, node in plugins.items() if not whys[node.op_type]}
    del copy.functions[:]
    for function in model.functions:
        if function.domain != NAMESPACE or (function.name, function.overload) not in taken:
            merges = function.name.startswith(HEADS_MERGE)
            copy.functions.append(with_static_rows(function) if merges else function)
    for i, node in plugins.items():
        if whys[node.op_type]:
            continue
        copy.graph.node[i].CopyFrom(node)
    # Nodes keep their overload until the functions are inlined: another node may have the function without an overload.
    seen = inliner.inline_local_functions(copy)
    for node in seen.graph.node:
        if node.domain == NAMESPACE:
            node.overload = ""
    return with_typed_weights(seen), whys


def _plugin_node(node: onnx.NodeProto) -> onnx.NodeProto:
    import onnx

    plugin = onnx.NodeProto()
    plugin.CopyFrom(node)
    plugin.input[:] = [name for name in node.input if name]  # only the last input, the sink logits, may be missing
    return plugin


def with_static_rows(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """Return MergeCache's ONNX function (compression of KV caches) with a fixed number of evicted slots per KV head.

    The fixed number is the most slots that a merge ever evicts. If fewer slots are over the budget, empty slots fill up
    the number. The result stays the same, but no tensor's shape depends on values.
    """
    import onnx

    copy = onnx.FunctionProto()
    copy.CopyFrom(function)
    row_nodes = [node for node in copy.node if EVICTED in node.output]
    if not row_nodes or not any(MOST_EVICTED in node.output for node in copy.node):
        raise KvexportError(
            f"the function of MergeCache has no {EVICTED} or no {MOST_EVICTED}, so its shapes depend on values",
            "build the artifact again; if the error stays, report it with the output of kvexport doctor",
        )
    for node in row_nodes:
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
    return lambda _: reason


def refused_operator(op_type: str) -> tuple[str, str]:
    return f"the model has {REFUSED[op_type]}, which TensorRT does not run", f"--backend {default()} --device cuda"


def operators_of(whys: Mapping[str, str], has_merge: bool) -> dict[str, str | None]:
    result: dict[str, str | None] = {name: "function" if whys.get(name) else "plugin" for name in OPERATORS}
    return result if has_merge else {**result, "MergeCache": None}
