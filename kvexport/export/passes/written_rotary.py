"""The graph pass that recognizes a rotary embedding written out in elementary nodes and makes it a RotaryEmbedding.

    swapped = Concat<axis = -1>(Neg(Slice(x, D / 2 to D)), Slice(x, 0 to D / 2))        x [B, H, T, D]
    y = Add(Mul(x, c), Mul(swapped, s))                                                 all in either order
=>  y = RotaryEmbedding(x, c', s')                                                      c', s' [B, T, D / 2]

x is an output of a Linear node. c and s are [B, 1, T, D], Unsqueeze<1>(...) of two equal halves: the nodes Cos, Sin,
Cast and a Mul by one number keep the halves of Concat<axis = -1>(f, f) equal. c' and s' are computed of f alone. The
exporter's own fusion leaves out models whose cosines are of another type than their heads.
"""

import onnx_ir as ir

from kvexport.export.passes.forms import linear_of
from kvexport.export.passes.nodes import is_op, known_shape, producer, replace
from kvexport.export.passes.rewrite import at_every_node

BY_ELEMENT = ("Cos", "Sin", "Cast", "Mul")


@at_every_node
def recognize_rotary(node: ir.Node) -> bool:
    for i in (0, 1):
        straight, crossed = (producer(node, j, "Mul") if is_op(node, "Add") else None for j in (i, 1 - i))
        if straight is None or crossed is None:
            continue
        for j, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
            heads, swapped = straight.inputs[j], producer(crossed, k, "Concat")
            if heads is None or swapped is None or linear_of(straight, j) is None:
                continue
            tables = [_before_heads(x, heads) for x in (straight.inputs[1 - j], crossed.inputs[1 - k])]
            read_here_alone = len(heads.uses()) == 3 and not heads.is_graph_output()
            if read_here_alone and _swaps_halves(swapped, heads) and all(map(_has_equal_halves, tables)):
                replace([straight, crossed, node], ir.node("RotaryEmbedding", [heads, *map(_half, tables)]))
                return True
    return False


def _swaps_halves(concat: ir.Node, x: ir.Value) -> bool:
    """Return whether a node computes (-second half, first half) of the last dimension of x [B, H, T, D]."""
    negative, first = (producer(concat, i, op) for i, op in enumerate(("Neg", "Slice")))
    second = producer(negative, 0, "Slice") if negative is not None else None
    last, size = concat.attributes.get_int("axis", 0) in (-1, 3), (known_shape(x) or ("",))[-1]
    if first is None or second is None or len(concat.inputs) != 2 or not last or not isinstance(size, int) or size % 2:
        return False
    return _slices(first, x, 0, size // 2) and _slices(second, x, size // 2, size)


def _slices(node: ir.Node, x: ir.Value, start: int, end: int) -> bool:
    """Return whether a Slice takes the elements start <= i < end of the last dimension of x [B, H, T, D]."""
    limits = [
        value.const_value.numpy().ravel().tolist()
        for value in node.inputs[1:]
        if value is not None and value.const_value is not None
    ]
    if node.inputs[0] is not x or [len(value) for value in limits] != [1] * 4:
        return False
    (first,), (last,), (axis,), (step,) = limits
    return first == start and min(last, known_shape(x)[-1]) == end and axis in (-1, 3) and step == 1


def _before_heads(table: ir.Value | None, heads: ir.Value) -> ir.Value | None:
    """Return the table [B, T, D] that becomes `table` [B, 1, T, D] for `heads` [B, H, T, D]; None for another value."""
    apart = table.producer() if table is not None else None
    axes = apart.inputs[1] if apart is not None and is_op(apart, "Unsqueeze") else None
    if apart is None or axes is None or axes.const_value is None or axes.const_value.numpy().tolist() != [1]:
        return None
    shape = known_shape(heads)
    return apart.inputs[0] if len(shape) == 4 and known_shape(table) == (shape[0], 1, *shape[2:]) else None


def _has_equal_halves(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if value is None or node is None or node.graph is None:
        return False
    if _repeats(node):
        return node.attributes.get_int("axis", 0) in (-1, len(known_shape(value)) - 1)
    of_one_number = all(x is not None and x.is_initializer() and known_shape(x) in ((), (1,)) for x in node.inputs[1:])
    return not node.domain and node.op_type in BY_ELEMENT and of_one_number and _has_equal_halves(node.inputs[0])


def _half(value: ir.Value | None) -> ir.Value:
    """Return one half [B, T, D / 2] of a table of two equal halves; add nodes if no node computes it yet."""
    node = value.producer() if value is not None else None
    assert value is not None and node is not None and node.graph is not None
    source = node.inputs[0]
    if _repeats(node):
        assert source is not None
        return source
    half, name = _half(source), f"{value.name}.half"
    for use in half.uses():
        if use.node.outputs[0].name == name:
            return use.node.outputs[0]
    half_node = ir.Node("", node.op_type, [half, *node.inputs[1:]], node.attributes.values(), name=f"{node.name}.half")
    half_node.outputs[0].name, half_node.outputs[0].type = name, value.type
    *rest, size = known_shape(value) or ("",)
    if isinstance(size, int):
        half_node.outputs[0].shape = ir.Shape([*rest, size // 2])
    node.graph.insert_after(node, half_node)
    return half_node.outputs[0]


def _repeats(node: ir.Node) -> bool:
    return is_op(node, "Concat") and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
