"""The passes that turn matrix products into Linear nodes, and add the steps around a product to the product's node.

The passes stand in the order in which they run. Each pass shows the nodes that it looks for, and their replacement.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.forms import (
    dtype_of,
    form_of,
    inputs_of,
    is_linear,
    join,
    linear_of,
    operands,
    outputs_of,
    put_linear,
    steps_of,
)
from kvexport.export.passes.nodes import HEADS_TO_FRONT, dims, is_op, known_shape, permutes, producer, read_only, show
from kvexport.export.passes.packed import Packed, packed_of
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import Form

READ_TWICE = "its product is read by other nodes too"
MOST_PRODUCTS = 3  # the most matrix products of one Linear node


# A matrix product with a checkpoint's weight becomes a Linear node:
#
#     t = Transpose<perm = [1, 0]>(w)     w an initializer [outputs, inputs], float32 or float16
#     y = MatMul(x, t)
# =>  y = Linear(x, w)
#
#     where w is a packed weight, dequantized as `kvexport.export.passes.packed` writes it
# =>  y = Linear(x, weight, scale, ...)       packed, group


class Product(NamedTuple):
    transpose: ir.Node
    product: ir.Node
    data: ir.Value
    weight: ir.Value
    packed: Packed | None


def product_pattern(node: ir.Node) -> list[Product]:
    transpose = producer(node, 1, "Transpose") if is_op(node, "MatMul") else None
    if transpose is None:
        return []
    data, weight = node.inputs[0], transpose.inputs[0]
    return (
        [Product(transpose, node, data, weight, packed_of(weight))] if data is not None and weight is not None else []
    )


def product_check(match: Product) -> str:
    if not permutes(match.transpose, [1, 0]):
        return "its second factor is not the transpose of a matrix"
    if match.packed is not None:
        return ""
    if not match.weight.is_initializer():
        return f"{match.weight.name} is computed, not a weight"
    if match.weight.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return f"{match.weight.name} is {match.weight.dtype}, not float32 or float16"
    return ""


def product_rewrite(match: Product) -> None:
    form, parts = Form(), [match.weight]
    if match.packed is not None:
        packing, parts = match.packed
        form = Form(packed=(packing.kind,), group=(packing.group,))
    put_linear([match.transpose, match.product], [match.data, *parts], form)


PRODUCT = Rewrite("product", product_pattern, product_check, product_rewrite)


# A bias becomes an input of its Linear node:
#
#     p = Linear(x, w)        read by nothing else, nothing fused yet
#     y = Add(p, b)           or Add(b, p); b an initializer [outputs]
# =>  y = Linear(x, w, b)     bias = [1]


class Sum(NamedTuple):
    linear: ir.Node
    addend: ir.Value
    add: ir.Node


def bias_pattern(node: ir.Node) -> list[Sum]:
    return [Sum(linear, other, node) for linear, other in operands(node, "Add") if other.is_initializer()]


def bias_check(match: Sum) -> str:
    if not read_only(match.linear.outputs[0]):
        return READ_TWICE
    if steps_of(match.linear) != Form():
        return f"its Linear does more already ({match.linear.overload})"
    outputs = outputs_of(match.linear)
    if known_shape(match.addend) != (outputs,):
        return f"{match.addend.name} has {show(dims(match.addend))}, not [{outputs}]"
    return ""


def bias_rewrite(match: Sum) -> None:
    form = replace(form_of(match.linear), bias=(1,))
    put_linear([match.linear, match.add], [*match.linear.inputs, match.addend], form)


BIAS = Rewrite("bias", bias_pattern, bias_check, bias_rewrite)


# LoRA adapters become a step of the Linear node whose product they change:
#
#     p = Linear(x, w, ...)                   read by nothing else; it has at most a bias
#     n = MatMul(x, Transpose(first))         first [rows, inputs]: the LoRA matrices A of all adapters
#     y = Add(p, MatMul(Mul(n, r), second))   second [rows, outputs]: the LoRA matrices B, transposed and scaled
# =>  y = Linear(x, r, w, ..., first, second)     adapted = [1], an AdaptedLinear
#
# The input r [B, 1, rows] is 1 for the rows of the adapter that a batch lane uses, and 0 for all other rows.


class Adapted(NamedTuple):
    linear: ir.Node
    data: ir.Value
    rows: ir.Value
    first: ir.Value
    second: ir.Value
    add: ir.Node


def adapters_pattern(node: ir.Node) -> list[Adapted]:
    matches = []
    for linear, change in operands(node, "Add"):
        wide = change.producer()
        selected = producer(wide, 0, "Mul") if wide is not None and wide.op_type == "MatMul" else None
        narrow = producer(selected, 0, "MatMul") if selected is not None else None
        transpose = producer(narrow, 1, "Transpose") if narrow is not None else None
        if wide is None or selected is None or narrow is None or transpose is None or not permutes(transpose, [1, 0]):
            continue
        data, rows, first, second = narrow.inputs[0], selected.inputs[1], transpose.inputs[0], wide.inputs[1]
        if data is not None and rows is not None and first is not None and second is not None:
            matches.append(Adapted(linear, data, rows, first, second, node))
    return matches


def adapters_check(match: Adapted) -> str:
    linear, data, rows, first, second, _ = match
    if not read_only(linear.outputs[0]):
        return READ_TWICE
    if steps_of(linear) != Form(bias=form_of(linear).bias) or form_of(linear).adapted:
        return f"its Linear does more already ({linear.overload})"
    if data is not linear.inputs[0]:
        return f"the adapters read {data.name}, not {linear.inputs[0].name if linear.inputs[0] is not None else None}"
    shape, count = known_shape(data), (known_shape(first) or (None,))[0]
    expected = ((count, *shape[-1:]), (count, outputs_of(linear)), (*shape[:1], 1, count))
    if len(shape) != 3 or tuple(map(known_shape, (first, second, rows))) != expected:
        return f"the adapters have {', '.join(show(dims(x)) for x in (first, second, rows))} for {show(dims(data))}"
    return ""


def adapters_rewrite(match: Adapted) -> None:
    data, *others = match.linear.inputs
    form = replace(form_of(match.linear), adapted=(1,))
    put_linear([match.linear, match.add], [data, match.rows, *others, match.first, match.second], form)


ADAPTERS = Rewrite("adapters", adapters_pattern, adapters_check, adapters_rewrite)


# The two products of a gated MLP, one under SiLU, become one Linear node with a gate:
#
#     p = Linear(x, w)                up projection, perhaps with a bias; read only by the last Mul
#     g = Linear(x, v)                gate projection, without further steps; read only by Mul and Sigmoid below
#     s = Mul(g, Sigmoid(g))
#     y = Mul(s, p)                   every Mul in either order
# =>  y = Linear(x, w, v)             gate = 1


class Gated(NamedTuple):
    linear: ir.Node
    gate: ir.Node
    # SiLU is two nodes, of which `silu` multiplies the gate with its sigmoid. An activation of one node, and so another
    # than SiLU, is both.
    sigmoid: ir.Node
    silu: ir.Node
    product: ir.Node


def gate_pattern(node: ir.Node) -> list[Gated]:
    matches = []
    for linear, other in operands(node, "Mul"):
        activation = other.producer()
        if activation is None:
            continue
        for gate, value in operands(activation, "Mul"):
            sigmoid = value.producer()
            if sigmoid is not None and is_op(sigmoid, "Sigmoid"):
                matches.append(Gated(linear, gate, sigmoid, activation, node))
        if len(activation.inputs) == 1 and (source := linear_of(activation, 0)) is not None and source is not linear:
            matches.append(Gated(linear, source, activation, activation, node))
    return matches


def gate_check(match: Gated) -> str:
    linear, gate, sigmoid, silu, _ = match
    if sigmoid is silu:
        return f"its activation is {silu.op_type}, not SiLU"
    if sigmoid.inputs[0] is not gate.outputs[0]:
        return "the sigmoid is not of the value that it multiplies"
    if not read_only(linear.outputs[0]):
        return READ_TWICE
    if not (read_only(gate.outputs[0], 2) and read_only(sigmoid.outputs[0]) and read_only(silu.outputs[0])):
        return "the gate is read by other nodes too"
    if gate is linear or gate.inputs[0] is not linear.inputs[0]:
        return "the gate and the product it multiplies are not two products of one input"
    if outputs_of(gate) != outputs_of(linear):
        return f"the gate has {outputs_of(gate)} outputs, the product {outputs_of(linear)}"
    if steps_of(gate) != Form() or form_of(linear).gate:
        return f"the gate or the product does more already ({gate.overload or linear.overload})"
    return ""


def gate_rewrite(match: Gated) -> None:
    products = [match.linear, match.gate]
    form = join(replace(form_of(match.linear), gate=1), products)
    put_linear([*products, match.sigmoid, match.silu, match.product], inputs_of(products), form)


GATE = Rewrite("gate", gate_pattern, gate_check, gate_rewrite)


# A residual addition becomes the last step of the Linear node before it:
#
#     p = Linear(x, w, ...)       read by nothing else
#     y = Add(p, r)               or Add(r, p); r of the shape of p, computed
# =>  y = Linear(x, w, ..., r)    residual = 1


def residual_pattern(node: ir.Node) -> list[Sum]:
    return [Sum(linear, other, node) for linear, other in operands(node, "Add") if not other.is_initializer()]


def residual_check(match: Sum) -> str:
    product = match.linear.outputs[0]
    if not read_only(product):
        return READ_TWICE
    if form_of(match.linear).residual:
        return "its Linear has a residual already"
    # ONNX's Add would broadcast one row to all rows.
    if not known_shape(product) or known_shape(product) != known_shape(match.addend):
        return f"{match.addend.name} has {show(dims(match.addend))}, its product {show(dims(product))}"
    return ""


def residual_rewrite(match: Sum) -> None:
    form = replace(form_of(match.linear), residual=1)
    put_linear([match.linear, match.add], [*match.linear.inputs, match.addend], form)


RESIDUAL = Rewrite("residual", residual_pattern, residual_check, residual_rewrite)


# A Linear node splits its output into heads:
#
#     p = Linear(x, w, ...)                       [B, T, H D] of H heads of size D, read by nothing else
#     h = Reshape(p, ...)                         [B, T, H, D]
#     y = Transpose<perm = [0, 2, 1, 3]>(h)       [B, H, T, D]
# =>  y = Linear(x, w, ...)                       output_heads = [H]
#
# or reads an input that is split into heads:
#
#     t = Transpose<perm = [0, 2, 1, 3]>(x)       [B, H, T, D] to [B, T, H, D]
#     f = Reshape(t, ...)                         [B, T, H D]
#     y = Linear(f, w, ...)
# =>  y = Linear(x, w, ...)                       input_heads = H


class Heads(NamedTuple):
    linear: ir.Node
    reshape: ir.Node
    transpose: ir.Node


def _wrong_shapes(flat: ir.Value, apart: ir.Value) -> str:
    one, other = dims(flat), dims(apart)
    known = len(one) == 3 and len(other) == 4 and None not in (*one, *other)
    if known and one[:2] == other[:2] and isinstance(other[2], int):
        return ""
    return f"the Reshape is between {show(one)} and {show(other)}, not between [B, T, H D] and [B, T, H, D]"


def _heads(apart: ir.Value) -> int:
    heads = dims(apart)[2]
    assert isinstance(heads, int)
    return heads


def output_pattern(node: ir.Node) -> list[Heads]:
    reshape = producer(node, 0, "Reshape") if permutes(node, HEADS_TO_FRONT) else None
    linear = linear_of(reshape, 0) if reshape is not None else None
    return [Heads(linear, reshape, node)] if reshape is not None and linear is not None else []


def output_check(match: Heads) -> str:
    if not read_only(match.linear.outputs[0]) or not read_only(match.reshape.outputs[0]):
        return READ_TWICE
    if form_of(match.linear).output_heads != (0,):
        return "its Linear sets heads apart already"
    return _wrong_shapes(match.linear.outputs[0], match.reshape.outputs[0])


def output_rewrite(match: Heads) -> None:
    form = replace(form_of(match.linear), output_heads=(_heads(match.reshape.outputs[0]),))
    put_linear([match.linear, match.reshape, match.transpose], match.linear.inputs, form)


def input_pattern(node: ir.Node) -> list[Heads]:
    reshape = producer(node, 0, "Reshape") if is_linear(node) else None
    transpose = producer(reshape, 0, "Transpose") if reshape is not None else None
    if reshape is None or transpose is None or not permutes(transpose, HEADS_TO_FRONT):
        return []
    return [Heads(node, reshape, transpose)]


def input_check(match: Heads) -> str:
    if not read_only(match.transpose.outputs[0]) or not read_only(match.reshape.outputs[0]):
        return "its input without heads is read by other nodes too"
    if form_of(match.linear).input_heads:
        return "its Linear reads heads already"
    return _wrong_shapes(match.reshape.outputs[0], match.transpose.outputs[0])


def input_rewrite(match: Heads) -> None:
    form = replace(form_of(match.linear), input_heads=_heads(match.transpose.outputs[0]))
    inputs = [match.transpose.inputs[0], *match.linear.inputs[1:]]
    put_linear([match.transpose, match.reshape, match.linear], inputs, form)


OUTPUT_HEADS = Rewrite("output heads", output_pattern, output_check, output_rewrite)
INPUT_HEADS = Rewrite("input heads", input_pattern, input_check, input_rewrite)


# Linear nodes with one input, such as query, key and value projections, become one:
#
#     a = Linear(x, w, ...)       each with at most a bias and heads of its own; three at most
#     b = Linear(x, v, ...)       w and v of one type
# =>  a, b = Linear(x, w, ..., v, ...)


def shared_pattern(node: ir.Node) -> list[list[ir.Node]]:
    data = node.inputs[0] if _is_plain(node) else None
    if data is None:
        return []
    others = [use.node for use in data.uses() if use.node is not node and use.idx == 0 and _is_plain(use.node)]
    return [[node, *others][:MOST_PRODUCTS]] if others else []


def shared_check(match: list[ir.Node]) -> str:
    types = list(dict.fromkeys(dtype_of(linear) for linear in match))
    return "" if len(types) == 1 else f"the weights of its input's products are {' and '.join(map(str, types))}"


def shared_rewrite(match: list[ir.Node]) -> None:
    forms = [form_of(linear) for linear in match]
    heads, bias = (tuple(getattr(form, name)[0] for form in forms) for name in ("output_heads", "bias"))
    form = join(Form(output_heads=heads, bias=bias, rotated=(0,) * len(forms)), match)
    put_linear(match, inputs_of(match), form, [linear.outputs[0] for linear in match])


def _is_plain(node: ir.Node) -> bool:
    if not is_linear(node):
        return False
    form = steps_of(node)
    return form == Form(output_heads=form.output_heads[:1], bias=form.bias[:1])


SHARED_INPUT = Rewrite("shared input", shared_pattern, shared_check, shared_rewrite)


# An RMSNorm becomes the first step of the only Linear node that reads its output:
#
#     n = RMSNormalization<axis = -1>(x, scale)       scale [inputs], of the type of x and of the weights
#     y = Linear(n, w, ...)
# =>  y = Linear(x, scale, w, ...)                    norm = 1, epsilon
#
# Linear always normalizes in float32, so the attribute stash_type of RMSNormalization has no effect.


class Normed(NamedTuple):
    norm: ir.Node
    data: ir.Value
    scale: ir.Value
    linear: ir.Node


def norm_pattern(node: ir.Node) -> list[Normed]:
    cast = producer(node, 0, "Cast") if is_linear(node) else None  # which the check then refuses with a reason
    norm = producer(cast or node, 0, "RMSNormalization") if is_linear(node) else None
    if norm is None:
        return []
    data, scale = norm.inputs
    return [Normed(norm, data, scale, node)] if data is not None and scale is not None else []


def norm_check(match: Normed) -> str:
    norm, data, scale, linear = match
    form, types = form_of(linear), (data.dtype, scale.dtype, dtype_of(linear))
    if linear.inputs[0] is not norm.outputs[0]:
        return f"its rows are normalised in {scale.dtype} and cast to the weights' {dtype_of(linear)}"
    if form.norm or form.input_heads:
        return f"its Linear does more with its input already ({linear.overload})"
    if not read_only(norm.outputs[0]):
        return "its normalised rows are read by other nodes too"
    if len(set(types)) != 1:
        return f"rows, scale and weights are {', '.join(map(str, types))}, not of one type"
    last, axis = len(known_shape(data)) - 1, norm.attributes.get_int("axis", -1)
    if last < 1 or axis not in (-1, last) or known_shape(scale) != known_shape(data)[-1:]:
        return f"axis {axis} of {show(dims(data))} with a scale of {show(dims(scale))} is not the norm of whole rows"
    return ""


def norm_rewrite(match: Normed) -> None:
    epsilon = match.norm.attributes.get_float("epsilon", 1e-5)
    form = replace(form_of(match.linear), norm=1, epsilon=float(f"{epsilon:.6g}"))
    inputs = [match.data, match.scale, *match.linear.inputs[1:]]
    put_linear([match.norm, match.linear], inputs, form, match.linear.outputs)


NORM = Rewrite("norm", norm_pattern, norm_check, norm_rewrite)


# The rotary embedding of heads becomes the last step of the Linear node that computes the heads:
#
#     a, b = Linear(x, w, v, ...)                 a [B, H, T, D], read by nothing else
#     y = RotaryEmbedding(a, cosine, sine)        rotates elements f and f + D / 2 of a head together
# =>  y, b = Linear(x, w, v, ..., cosine, sine)   rotated = [1, 0]; cosine, sine [B, T, D / 2]
#
# A Linear node rotates all its rotated outputs by the same cosines and sines.


class Rotated(NamedTuple):
    linear: ir.Node
    rotary: ir.Node
    heads: ir.Value
    angles: list[ir.Value]


def rotary_pattern(node: ir.Node) -> list[Rotated]:
    linear = linear_of(node, 0) if is_op(node, "RotaryEmbedding") and len(node.inputs) == 3 else None
    heads, cosine, sine = node.inputs if linear is not None else (None, None, None)
    if linear is None or heads is None or cosine is None or sine is None:
        return []
    return [Rotated(linear, node, heads, [cosine, sine])]


def rotary_check(match: Rotated) -> str:
    form, i = form_of(match.linear), list(match.linear.outputs).index(match.heads)
    for name in ("interleaved", "rotary_embedding_dim"):
        if value := match.rotary.attributes.get_int(name, 0):
            return f"{name} is {value}"
    if form.gate or form.residual:
        return f"its Linear has a gate or a residual ({match.linear.overload})"
    if not read_only(match.heads):
        return "its heads are read by other nodes too"
    if not form.output_heads[i] or form.rotated[i]:
        return "its Linear sets no heads apart" if not form.output_heads[i] else "its heads are rotated already"
    if any(form.rotated) and list(match.linear.inputs[-2:]) != match.angles:
        return "its Linear rotates other heads by other angles"
    return ""


def rotary_rewrite(match: Rotated) -> None:
    form, inputs, i = form_of(match.linear), list(match.linear.inputs), list(match.linear.outputs).index(match.heads)
    rotated = tuple(int(was or j == i) for j, was in enumerate(form.rotated))
    rest = inputs[:-2] if any(form.rotated) else inputs
    outputs = [match.rotary.outputs[0] if output is match.heads else output for output in match.linear.outputs]
    put_linear([match.linear, match.rotary], [*rest, *match.angles], replace(form, rotated=rotated), outputs)


ROTARY = Rewrite("rotary embedding", rotary_pattern, rotary_check, rotary_rewrite)
