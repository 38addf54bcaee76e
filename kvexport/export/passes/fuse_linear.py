"""Which nodes of a traced decoder become a Linear (`kvexport.ops.linear`): only where the shapes in the graph leave no
doubt of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir

from kvexport.ops.linear import Form, linear_function
from kvexport.ops.onnx_function import DOMAIN

TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
HEADS_LAST_TO_FIRST = [0, 2, 1, 3]  # [B, T, H, D] <-> [B, H, T, D]
MOST_PRODUCTS = 3  # of one Linear


def use_linear(graph: ir.Graph) -> None:
    """Products with the transpose of an initializer become Linear, with what is around each of them."""
    for fold in (_product, _bias, _gate, _residual, _output_heads, _input_heads):
        for node in list(graph):
            if node.graph is not None:
                fold(node)


def join_linears(graph: ir.Graph) -> None:
    """Products of one input become one Linear, with the norm before and the rotary embedding after them."""
    for fold in (_siblings, _norm, _rotary, _turned):
        for node in list(graph):
            if node.graph is not None:
                fold(node)
    # What was joined stands where the last of its parts stood.
    graph.sort()


def linear_functions(graph: ir.Graph) -> list[onnx.FunctionProto]:
    """The functions of the Linears in the graph."""
    forms = {_form(node) for node in graph if _is(node, "Linear", DOMAIN)}
    return [linear_function(form) for form in sorted(forms, key=lambda form: form.overload)]


def _product(node: ir.Node) -> None:
    transpose = _maker(node, 1, "Transpose") if _is(node, "MatMul") else None
    if transpose is None or not _permutes(transpose, [1, 0]):
        return
    data, weight = node.inputs[0], transpose.inputs[0]
    if data is not None and weight is not None and weight.is_initializer() and weight.dtype in TYPES:
        _replace([transpose, node], [data, weight], Form())


def _bias(node: ir.Node) -> None:
    """product + [outputs]"""
    for linear, other in _operands(node, "Add"):
        form = _form(linear)
        if form == Form() and other.is_initializer() and _shape(other) == (_outputs(linear),):
            return _replace([linear, node], [*linear.inputs, other], Form(bias=(1,)))
    return None


def _gate(node: ir.Node) -> None:
    """(gate x sigmoid(gate)) x product, both products of one input"""
    for linear, other in _operands(node, "Mul"):
        silu = other.producer()
        if silu is None or not _is(silu, "Mul") or not _used_once(other) or linear.outputs[0] is other:
            continue
        for gate, value in _operands(silu, "Mul", uses=2):
            sigmoid = value.producer()
            if (
                sigmoid is None
                or not _is(sigmoid, "Sigmoid")
                or sigmoid.inputs[0] is not gate.outputs[0]
                or not _used_once(value)
            ):
                continue
            same = gate.inputs[0] is linear.inputs[0] and gate is not linear and _outputs(gate) == _outputs(linear)
            if same and _form(gate) == Form() and not _form(linear).gate:
                inputs = [*linear.inputs, gate.inputs[1]]
                return _replace([linear, gate, sigmoid, silu, node], inputs, replace(_form(linear), gate=1))
    return None


def _residual(node: ir.Node) -> None:
    """product + x of one shape"""
    for linear, other in _operands(node, "Add"):
        form = _form(linear)
        if (
            not form.residual
            and not other.is_initializer()
            and _shape(other)
            and _shape(other) == _shape(linear.outputs[0])
        ):
            return _replace([linear, node], [*linear.inputs, other], replace(form, residual=1))
    return None


def _output_heads(node: ir.Node) -> None:
    """[B, T, H D] -> [B, T, H, D] -> [B, H, T, D]"""
    reshape = _maker(node, 0, "Reshape") if _permutes(node, HEADS_LAST_TO_FIRST) else None
    linear = _maker(reshape, 0, "Linear", DOMAIN) if reshape is not None and _used_once(reshape.outputs[0]) else None
    if reshape is None or linear is None or not _used_once(linear.outputs[0]):
        return
    flat, apart, form = _shape(linear.outputs[0]), _shape(reshape.outputs[0]), _form(linear)
    if (
        len(flat) == 3
        and len(apart) == 4
        and flat[:2] == apart[:2]
        and isinstance(apart[2], int)
        and form.output_heads == (0,)
    ):
        _replace([linear, reshape, node], linear.inputs, replace(form, output_heads=(apart[2],)))


def _input_heads(node: ir.Node) -> None:
    """[B, H, T, D] -> [B, T, H, D] -> [B, T, H D], into a product"""
    reshape = _maker(node, 0, "Reshape") if _is(node, "Linear", DOMAIN) else None
    swap = _maker(reshape, 0, "Transpose") if reshape is not None and _used_once(reshape.outputs[0]) else None
    if reshape is None or swap is None or not _permutes(swap, HEADS_LAST_TO_FIRST) or not _used_once(swap.outputs[0]):
        return
    apart, flat, form, heads_first = _shape(swap.outputs[0]), _shape(reshape.outputs[0]), _form(node), swap.inputs[0]
    if (
        len(flat) == 3
        and len(apart) == 4
        and flat[:2] == apart[:2]
        and isinstance(apart[2], int)
        and not form.input_heads
    ):
        inputs = [heads_first, *node.inputs[1:]]
        _replace([swap, reshape, node], inputs, replace(form, input_heads=apart[2]))


def _siblings(node: ir.Node) -> None:
    """Products of one input, as queries, keys and values are."""
    data = node.inputs[0] if _is_plain(node) else None
    if data is None:
        return
    others = [use.node for use in data.uses() if use.node is not node and use.idx == 0 and _is_plain(use.node)]
    joined = [node, *others][:MOST_PRODUCTS]
    if len(joined) > 1 and len({_weight(other).dtype for other in joined}) == 1:
        forms = [_form(other) for other in joined]
        heads, bias = (tuple(getattr(form, name)[0] for form in forms) for name in ("output_heads", "bias"))
        form = Form(output_heads=heads, bias=bias, turned=(0,) * len(forms))
        _put(
            joined,
            [other.outputs[0] for other in joined],
            [data, *(x for other in joined for x in other.inputs[1:])],
            form,
        )


def _norm(node: ir.Node) -> None:
    """RMSNormalization of the rows that a Linear alone reads, which is in float32 whatever its stash_type"""
    if not _is(node, "Linear", DOMAIN):
        return
    norm, form = _maker(node, 0, "RMSNormalization"), _form(node)
    if norm is None or form.norm or form.input_heads or not _used_once(norm.outputs[0]):
        return
    data, scale = norm.inputs
    axis, epsilon = (norm.attributes.get(name) for name in ("axis", "epsilon"))
    if data is None or scale is None or scale.dtype != _weight(node).dtype or data.dtype != scale.dtype:
        return
    last = len(_shape(data)) - 1
    if last > 0 and _shape(scale) == _shape(data)[-1:] and (axis is None or axis.as_int() in (-1, last)):
        made = replace(form, norm=1, epsilon=float(f"{epsilon.as_float():.6g}") if epsilon is not None else 1e-5)
        _put([norm, node], list(node.outputs), [data, scale, *node.inputs[1:]], made)


def _rotary(node: ir.Node) -> None:
    """x cosine + (-second half of x, first half of x) sine, as models write it, of a product's heads:
    RotaryEmbedding"""
    for i in (0, 1):
        straight, crossed = (_maker(node, j, "Mul") if _is(node, "Add") else None for j in (i, 1 - i))
        if straight is None or crossed is None:
            continue
        for j, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
            heads, swapped = straight.inputs[j], _maker(crossed, k, "Concat")
            if (
                heads is None
                or swapped is None
                or not _swaps_halves(swapped, heads)
                or _maker(straight, j, "Linear", DOMAIN) is None
            ):
                continue
            tables = straight.inputs[1 - j], crossed.inputs[1 - k]
            angles = [_of_one_half(table, _shape(heads)) for table in tables]
            if None not in angles and len(heads.uses()) == 3 and not heads.is_graph_output():
                return _put_node([straight, crossed, node], ir.node("RotaryEmbedding", [heads, *angles]))
    return None


def _swaps_halves(concat: ir.Node, x: ir.Value) -> bool:
    """Whether it makes (-second half, first half) of the last dimension of x [B, H, T, D]."""
    negative, first = (_maker(concat, i, op) for i, op in enumerate(("Neg", "Slice")))
    second = _maker(negative, 0, "Slice") if negative is not None else None
    last, size = concat.attributes.get_int("axis", 0) in (-1, 3), (_shape(x) or ("",))[-1]
    if first is None or second is None or len(concat.inputs) != 2 or not last or not isinstance(size, int) or size % 2:
        return False
    return _slices(first, x, 0, size // 2) and _slices(second, x, size // 2, size)


def _slices(node: ir.Node, x: ir.Value, start: int, end: int) -> bool:
    """Whether a Slice takes [start, end) of the last dimension of x [B, H, T, D], to whose end any larger number leads
    too."""
    given = [
        value.const_value.numpy().ravel().tolist()
        for value in node.inputs[1:]
        if value is not None and value.const_value is not None
    ]
    if node.inputs[0] is not x or [len(value) for value in given] != [1] * 4:
        return False
    (first,), (last,), (axis,), (step,) = given
    return first == start and min(last, _shape(x)[-1]) == end and axis in (-1, 3) and step == 1


def _of_one_half(table: ir.Value | None, heads: tuple[int | str, ...]) -> ir.Value | None:
    """[B, T, D / 2] of a table [B, 1, T, D] whose halves are the same because they are made of the same, for heads [B,
    H, T, D]; None where that is not seen."""
    if table is None or len(heads) != 4 or _shape(table) != (heads[0], 1, *heads[2:]):
        return None
    apart = table.producer()
    axes = apart.inputs[1] if apart is not None and _is(apart, "Unsqueeze") else None
    if apart is None or axes is None or axes.const_value is None or axes.const_value.numpy().tolist() != [1]:
        return None
    return _half(apart.inputs[0])


def _half(value: ir.Value | None) -> ir.Value | None:
    node = value.producer() if value is not None else None
    if value is None or node is None:
        return None
    if _is(node, "Concat") and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]:
        return node.inputs[0] if node.attributes.get_int("axis", 0) in (-1, len(_shape(value)) - 1) else None
    others = node.inputs[1:]
    if (
        node.domain
        or node.op_type not in ("Cos", "Sin", "Cast", "Mul")
        or any(x is None or _shape(x) not in ((), (1,)) for x in others)
    ):
        return None
    if any(x is not None and not x.is_initializer() for x in others):
        return None
    half = _half(node.inputs[0])
    if half is None or node.graph is None:
        return None
    name = f"{value.name}.half"
    for use in half.uses():
        if use.node.outputs[0].name == name:
            return use.node.outputs[0]
    made = ir.Node("", node.op_type, [half, *others], node.attributes.values(), name=f"{node.name}.half")
    made.outputs[0].name, made.outputs[0].type = name, value.type
    *dims, size = _shape(value) or ("",)
    if isinstance(size, int):
        made.outputs[0].shape = ir.Shape([*dims, size // 2])
    node.graph.insert_after(node, made)
    return made.outputs[0]


def _turned(node: ir.Node) -> None:
    """RotaryEmbedding of heads that a Linear sets apart, over planes of dimensions (f, f + F)"""
    linear = _maker(node, 0, "Linear", DOMAIN) if _is(node, "RotaryEmbedding") and len(node.inputs) == 3 else None
    known = node.attributes.get("interleaved"), node.attributes.get("rotary_embedding_dim")
    if linear is None or any(attribute is not None and attribute.as_int() for attribute in known):
        return
    heads, cosine, sine = node.inputs
    form = _form(linear)
    if heads is None or cosine is None or sine is None or form.gate or form.residual or not _used_once(heads):
        return
    i = list(linear.outputs).index(heads)
    angles = list(linear.inputs[-2:]) if any(form.turned) else [cosine, sine]
    if angles == [cosine, sine] and form.output_heads[i] and not form.turned[i]:
        turned = tuple(int(was or j == i) for j, was in enumerate(form.turned))
        rest = list(linear.inputs)[: -2 if any(form.turned) else None]
        made = [node.outputs[0] if output is heads else output for output in linear.outputs]
        _put([linear, node], made, [*rest, *angles], replace(form, turned=turned))


def _is_plain(node: ir.Node) -> bool:
    """One product, to which nothing but a bias and heads of its own belong."""
    return _is(node, "Linear", DOMAIN) and _form(node) == Form(
        output_heads=_form(node).output_heads[:1], bias=_form(node).bias[:1]
    )


def _is(node: ir.Node, op_type: str, domain: str = "") -> bool:
    return node.op_type == op_type and node.domain == domain


def _permutes(node: ir.Node, order: list[int]) -> bool:
    perm = node.attributes.get("perm") if _is(node, "Transpose") else None
    return perm is not None and list(perm.as_ints()) == order


def _maker(node: ir.Node, i: int, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes input `i`, if it is one of these."""
    value = node.inputs[i]
    made = value.producer() if value is not None else None
    return made if made is not None and _is(made, op_type, domain) else None


def _operands(node: ir.Node, op_type: str, uses: int = 1) -> list[tuple[ir.Node, ir.Value]]:
    """Of a node of two inputs: each that a Linear makes for it alone (or for as many `uses`), as that node, with the
    other input."""
    if not _is(node, op_type) or len(node.inputs) != 2:
        return []
    found = []
    for i in (0, 1):
        linear, other = _maker(node, i, "Linear", DOMAIN), node.inputs[1 - i]
        if linear is not None and other is not None and _used_once(linear.outputs[0], uses):
            found.append((linear, other))
    return found


def _used_once(value: ir.Value, uses: int = 1) -> bool:
    return len(value.uses()) == uses and not value.is_graph_output()


def _shape(value: ir.Value) -> tuple[int | str, ...]:
    """Static sizes and names; empty where one of them is not known."""
    dims = [d if isinstance(d, int) else d.value for d in value.shape or ()]
    return tuple(d for d in dims if d is not None) if None not in dims else ()


def _weight(linear: ir.Node) -> ir.Value:
    weight = linear.inputs[1 + _form(linear).norm]
    assert weight is not None
    return weight


def _outputs(linear: ir.Node) -> int | str:
    return _shape(_weight(linear))[0]


def _form(linear: ir.Node) -> Form:
    values: dict[str, Any] = {}
    for name in vars(Form()):
        value = linear.attributes[name].value
        values[name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return Form(**values)


def _replace(nodes: list[ir.Node], inputs: Iterable[ir.Value | None], form: Form) -> None:
    """A Linear of one output in the place of the last of `nodes`; those of the others that nothing else reads go."""
    _put(nodes, [nodes[-1].outputs[0]], inputs, form)


def _put(nodes: list[ir.Node], made: list[ir.Value], inputs: Iterable[ir.Value | None], form: Form) -> None:
    """A Linear after the last of `nodes` that makes what they `made`; those of them that nothing else reads go."""
    attributes = ir.convenience.convert_attributes(form.attributes)
    linear = ir.Node(DOMAIN, "Linear", list(inputs), attributes, overload=form.overload, num_outputs=len(made))
    _put_node(nodes, linear, made)


def _put_node(nodes: list[ir.Node], new: ir.Node, made: list[ir.Value] | None = None) -> None:
    """`new` after the last of `nodes`, for what they `made` (what the last did); those of them that nothing else reads
    go."""
    last = nodes[-1]
    new.name = last.name
    graph = last.graph
    assert isinstance(graph, ir.Graph)
    graph.insert_after(last, new)
    for old, value in zip(made or last.outputs, new.outputs, strict=True):
        value.name, value.shape, value.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    for node in reversed(nodes):
        _remove_unread(node)


def _remove_unread(node: ir.Node) -> None:
    """A node that nothing reads goes, and with it what was made for it alone."""
    graph = node.graph
    if not isinstance(graph, ir.Graph) or any(x.uses() or x.is_graph_output() for x in node.outputs):
        return
    makers = [value.producer() for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    for maker in makers:
        if maker is not None:
            _remove_unread(maker)
