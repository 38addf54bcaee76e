"""Helpers of graph passes: properties of ONNX nodes and values, and the replacement of several nodes by one."""

from collections.abc import Sequence

import onnx_ir as ir

HEADS_TO_FRONT = [0, 2, 1, 3]  # [B, T, H, D] <-> [B, H, T, D]
Dims = tuple[int | str | None, ...]


def is_op(node: ir.Node, op_type: str, domain: str = "") -> bool:
    return node.op_type == op_type and node.domain == domain


def permutes(node: ir.Node, order: list[int]) -> bool:
    perm = node.attributes.get("perm") if is_op(node, "Transpose") else None
    return perm is not None and list(perm.as_ints()) == order


def producer(node: ir.Node, i: int, op_type: str, domain: str = "") -> ir.Node | None:
    """Return the ONNX node that computes input `i` of a node; None if that node has another operator type or domain."""
    value = node.inputs[i]
    source = value.producer() if value is not None else None
    return source if source is not None and is_op(source, op_type, domain) else None


def read_only(value: ir.Value, times: int = 1) -> bool:
    """Return whether a value of an ONNX graph is read exactly `times` times and is no output of the graph."""
    return len(value.uses()) == times and not value.is_graph_output()


def dims(value: ir.Value | None) -> Dims:
    """Return a value's dimensions as sizes or names; None for a dimension with neither, () for an unknown shape."""
    shape = value.shape if value is not None else None
    return tuple(d if isinstance(d, int) else d.value for d in shape or ())


def known_shape(value: ir.Value | None) -> tuple[int | str, ...]:
    """Return a value's dimensions as sizes or names; empty if one of its dimensions is unknown."""
    sizes = dims(value)
    return tuple(d for d in sizes if d is not None) if None not in sizes else ()


def replace(nodes: Sequence[ir.Node], new: ir.Node, outputs: Sequence[ir.Value] | None = None) -> None:
    """Replace `nodes` of a graph by the node `new`, which takes the place and the name of the last of them.

    The outputs of `new` replace `outputs` (None: the outputs of the last node). Replaced nodes are removed if no other
    node reads their outputs.
    """
    last = nodes[-1]
    new.name = last.name
    graph = last.graph
    assert isinstance(graph, ir.Graph)
    graph.insert_after(last, new)
    for old, value in zip(outputs or last.outputs, new.outputs, strict=True):
        value.name, value.shape, value.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    for node in reversed(nodes):
        _remove_unread(node)


def _remove_unread(node: ir.Node) -> None:
    graph = node.graph
    if not isinstance(graph, ir.Graph) or any(x.uses() or x.is_graph_output() for x in node.outputs):
        return
    makers = [value.producer() for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    for maker in makers:
        if maker is not None:
            _remove_unread(maker)
