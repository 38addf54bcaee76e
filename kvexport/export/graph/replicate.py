"""Copies of a traced decoder layer for all the layers that compute the same function.

The trace contains only a few layers. LayerBorder nodes mark where the hidden state enters and leaves a layer. A node
belongs to a layer if it depends on the hidden state within the layer's borders, or on the layer's own parameters. All
other values that these nodes read (positions, rotary tables, sizes, constants) are shared by all layers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from kvexport.export.graph.layers import Layers
from kvexport.ops.onnx_function import DOMAIN
from kvexport.plan.cache import CachePlan

BORDER = "LayerBorder"


@dataclass
class _Layer:
    number: int
    entry: ir.Node
    exit: ir.Node
    nodes: list[ir.Node] = field(default_factory=list)


def replicate_layers(model: ir.Model, layers: Layers, plan: CachePlan) -> bool:
    """Complete a trace that has only the layers `layers.traced()`; return whether this is possible."""
    graph = model.graph
    prefix = f"model.{layers.name}."
    traced = _find_layers(graph, prefix, plan)
    if tuple(traced) != layers.traced():
        return False
    if not all(_do_the_same(traced[layers.first[i]], layer, prefix) for i, layer in traced.items()):
        return False
    hidden = traced[0].entry.inputs[0]
    entering = {}
    for i, first in enumerate(layers.first):
        if i in traced:
            entering[traced[i].entry.outputs[0]] = hidden
            hidden = traced[i].exit.inputs[0]
        else:
            hidden = _copy(graph, traced[first], i, hidden, prefix, plan)
    entering[traced[max(traced)].exit.outputs[0]] = hidden
    for border, value in entering.items():
        border.replace_all_uses_with(value)  # type: ignore[arg-type]
    borders = [node for layer in traced.values() for node in (layer.entry, layer.exit)]
    graph.remove(borders, safe=True)
    graph.sort()
    for values in (graph.inputs, graph.outputs):
        values[:] = sorted(values, key=lambda value: _state_order(value, plan))
    return True


def _find_layers(graph: ir.Graph, prefix: str, plan: CachePlan) -> dict[int, _Layer]:
    """Return the traced decoder layers by number; empty if layers are not joined by one hidden state."""
    borders = {
        tuple(node.attributes[a].as_int() for a in ("layer", "end")): node for node in graph if node.op_type == BORDER
    }
    numbers = sorted({number for number, _ in borders})
    if len(borders) != 2 * len(numbers):
        return {}
    layers = {i: _Layer(i, borders[i, 0], borders[i, 1]) for i in numbers}
    owner = {layer.entry.outputs[0]: i for i, layer in layers.items()}
    for name, value in graph.initializers.items():
        if value.const_value is None and (inside := re.match(re.escape(prefix) + r"(\d+)\.", name)):
            owner[value] = int(inside[1])
    for node in graph:
        owners = {owner[value] for value in node.inputs if value in owner}
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            return {}
        if node.op_type == BORDER or not owners:
            continue
        if len(owners) > 1 or not owners <= layers.keys():
            return {}
        owner.update(dict.fromkeys(node.outputs, *owners))
        layers[min(owners)].nodes.append(node)
    state = {tensor.present(i): i for i in numbers for tensor in plan.caches[i].state}
    threaded = [(layer.entry.inputs[0], layer.exit.outputs[0]) for layer in layers.values()]
    regular = (
        all(owner.get(value) == state.get(str(value.name)) for value in graph.outputs)
        and all(owner.get(layer.exit.inputs[0]) == i for i, layer in layers.items())  # type: ignore[arg-type]
        and all(entered is left for (entered, _), (_, left) in zip(threaded[1:], threaded, strict=False))
        and threaded[0][0] not in owner
    )
    return layers if regular else {}


def _renamed(name: str, i: int, j: int, prefix: str) -> str | None:
    for start in (prefix, "past_key_values.", "present."):
        if name.startswith(f"{start}{i}."):
            return f"{start}{j}." + name.removeprefix(f"{start}{i}.")
    return None


def _do_the_same(first: _Layer, other: _Layer, prefix: str) -> bool:
    if first is other:
        return True
    pending = [(first.exit.inputs[0], other.exit.inputs[0])]
    attention = [[node for node in layer.nodes if node.op_type == "VoteAttention"] for layer in (first, other)]
    if [len(nodes) for nodes in attention] != [1, 1]:
        return False
    pending += zip(attention[0][0].outputs, attention[1][0].outputs, strict=True)
    seen = set()
    while pending:
        pair = x, y = pending.pop()
        shared = x is y and (x is None or _renamed(str(x.name), first.number, other.number, prefix) is None)
        if shared or pair in seen:
            continue
        seen.add(pair)
        if x is None or y is None:
            return False
        a, b = x.producer(), y.producer()
        if a is None or b is None:
            if a is not b or not _same_leaf(x, y, first.number, other.number, prefix):
                return False
        elif (a is first.entry) != (b is other.entry):
            return False
        elif a is not first.entry:
            if _meaning(a) != _meaning(b) or x.index() != y.index() or len(a.inputs) != len(b.inputs):
                return False
            pending += zip(a.inputs, b.inputs, strict=True)
    return True


def _same_leaf(x: ir.Value, y: ir.Value, i: int, j: int, prefix: str) -> bool:
    if x.const_value is None or y.const_value is None:
        return y.name == _renamed(str(x.name), i, j, prefix)
    return _bytes(x.const_value) == _bytes(y.const_value)


def _meaning(node: ir.Node) -> tuple[Any, ...]:
    attributes = {
        name: attribute.value for name, attribute in node.attributes.items() if (node.domain, name) != (DOMAIN, "layer")
    }
    values = [
        (name, _bytes(x) if isinstance(x, ir.TensorProtocol) else repr(x)) for name, x in sorted(attributes.items())
    ]
    return node.op_identifier(), values


def _bytes(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes()


def _copy(
    graph: ir.Graph, layer: _Layer, j: int, hidden: ir.Value | None, prefix: str, plan: CachePlan
) -> ir.Value | None:
    """Add a copy of a traced layer to the ONNX graph as layer j with input `hidden`; return its output hidden state."""
    shapes, copies = plan.caches[j].shapes(1), {layer.entry.outputs[0]: hidden}

    def copied(value: ir.Value) -> ir.Value:
        own = _renamed(str(value.name), layer.number, j, prefix)
        shape = value.shape
        if own and not own.startswith(prefix):
            assert shape is not None
            shape = ir.Shape([shape[0], *shapes[own.rpartition(".")[2]][1:]])
        new = ir.Value(name=own or f"layers.{j}.{value.name}", shape=shape, type=value.type)
        copies[value] = new
        return new

    for node in layer.nodes:
        for value in node.inputs:
            leaf = value is not None and value.producer() is None and value.const_value is None and value not in copies
            if leaf and _renamed(str(value.name), layer.number, j, prefix):  # type: ignore[union-attr]
                new = copied(value)  # type: ignore[arg-type]
                if value.is_graph_input():  # type: ignore[union-attr]
                    graph.inputs.append(new)
                else:
                    graph.initializers[str(new.name)] = new
        attributes = [
            ir.AttrInt64("layer", j) if (node.domain, name) == (DOMAIN, "layer") else a
            for name, a in node.attributes.items()
        ]
        inputs: Sequence[Any] = [copies.get(value, value) for value in node.inputs]  # type: ignore[arg-type]
        outputs = [copied(value) for value in node.outputs]
        graph.append(
            ir.Node(
                node.domain, node.op_type, inputs, attributes, overload=node.overload, outputs=outputs,
                version=node.version, name=f"layers.{j}.{node.name}",
            )
        )  # fmt: skip
        graph.outputs.extend(copies[value] for value in node.outputs if value.is_graph_output())  # type: ignore[misc]
    return copies[layer.exit.inputs[0]]  # type: ignore[index]


def _state_order(value: ir.Value, plan: CachePlan) -> tuple[int, int]:
    match = re.fullmatch(r"(?:past_key_values|present)\.(\d+)\.(\w+)", str(value.name))
    if not match:
        return (-1, 0)
    layer = int(match[1])
    return layer, [tensor.name for tensor in plan.caches[layer].state].index(match[2])
