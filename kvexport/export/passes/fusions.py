"""The passes that turn matrix products into Linear nodes, and add the steps around a product to the product's node.

The passes stand in the order in which they run. Each pass shows the nodes that it looks for, and their replacement.
"""

from dataclasses import replace

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
from kvexport.export.passes.nodes import HEADS_TO_FRONT, dims, is_op, known_shape, permutes, producer, read_only
from kvexport.export.passes.packed import packed_of
from kvexport.export.passes.rewrite import at_every_node
from kvexport.ops.linear import Form

MOST_PRODUCTS = 3  # the most matrix products of one Linear node


# A matrix product with a checkpoint's weight becomes a Linear node:
#
#     t = Transpose<perm = [1, 0]>(w)     w an initializer [outputs, inputs], float32 or float16
#     y = MatMul(x, t)
# =>  y = Linear(x, w)
#
#     where w is a packed weight, dequantized as `kvexport.export.passes.packed` writes it
# =>  y = Linear(x, weight, scale, ...)       packed, group


@at_every_node
def make_linear(node: ir.Node) -> bool:
    transpose = producer(node, 1, "Transpose") if is_op(node, "MatMul") else None
    if transpose is None or not permutes(transpose, [1, 0]):
        return False
    data, weight = node.inputs[0], transpose.inputs[0]
    if (packed := packed_of(weight)) is not None:
        form = Form(packed=(packed.packing.kind,), group=(packed.packing.group,))
        put_linear([transpose, node], [data, *packed.parts], form)
        return True
    if weight is None or not weight.is_initializer():
        return False
    if weight.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return False
    put_linear([transpose, node], [data, weight], Form())
    return True


# A bias becomes an input of its Linear node:
#
#     p = Linear(x, w)        read by nothing else, nothing fused yet
#     y = Add(p, b)           or Add(b, p); b an initializer [outputs]
# =>  y = Linear(x, w, b)     bias = [1]


@at_every_node
def add_bias(node: ir.Node) -> bool:
    for linear, bias in operands(node, "Add"):
        alone = read_only(linear.outputs[0]) and steps_of(linear) == Form()
        if alone and bias.is_initializer() and known_shape(bias) == (outputs_of(linear),):
            put_linear([linear, node], [*linear.inputs, bias], replace(form_of(linear), bias=(1,)))
            return True
    return False


# LoRA adapters become a step of the Linear node whose product they change:
#
#     p = Linear(x, w, ...)                   read by nothing else; it has at most a bias
#     n = MatMul(x, Transpose(first))         first [rows, inputs]: the LoRA matrices A of all adapters
#     y = Add(p, MatMul(Mul(n, r), second))   second [rows, outputs]: the LoRA matrices B, transposed and scaled
# =>  y = Linear(x, r, w, ..., first, second)     adapted = [1], an AdaptedLinear
#
# The input r [B, 1, rows] is 1 for the rows of the adapter that a batch lane uses, and 0 for all other rows.


@at_every_node
def add_adapters(node: ir.Node) -> bool:
    for linear, change in operands(node, "Add"):
        wide = change.producer()
        selected = producer(wide, 0, "Mul") if wide is not None and wide.op_type == "MatMul" else None
        narrow = producer(selected, 0, "MatMul") if selected is not None else None
        transpose = producer(narrow, 1, "Transpose") if narrow is not None else None
        if wide is None or selected is None or narrow is None or transpose is None or not permutes(transpose, [1, 0]):
            continue
        data, *others = linear.inputs
        rows, first, second = selected.inputs[1], transpose.inputs[0], wide.inputs[1]
        form, shape, count = form_of(linear), known_shape(data), (known_shape(first) or (None,))[0]
        expected = ((count, *shape[-1:]), (count, outputs_of(linear)), (*shape[:1], 1, count))
        fits = len(shape) == 3 and tuple(map(known_shape, (first, second, rows))) == expected
        alone = read_only(linear.outputs[0]) and steps_of(linear) == Form(bias=form.bias) and not form.adapted
        if fits and alone and narrow.inputs[0] is data:
            put_linear([linear, node], [data, rows, *others, first, second], replace(form, adapted=(1,)))
            return True
    return False


# The two products of a gated MLP, one under SiLU, become one Linear node with a gate:
#
#     p = Linear(x, w)                up projection, perhaps with a bias; read only by the last Mul
#     g = Linear(x, v)                gate projection, without further steps; read only by Mul and Sigmoid below
#     s = Mul(g, Sigmoid(g))
#     y = Mul(s, p)                   every Mul in either order
# =>  y = Linear(x, w, v)             gate = 1


@at_every_node
def add_gate(node: ir.Node) -> bool:
    for linear, activated in operands(node, "Mul"):
        silu = activated.producer()
        if silu is None:
            continue
        for gate, value in operands(silu, "Mul"):
            sigmoid = value.producer()
            if sigmoid is None or not is_op(sigmoid, "Sigmoid") or sigmoid.inputs[0] is not gate.outputs[0]:
                continue
            of_one_input = gate is not linear and gate.inputs[0] is linear.inputs[0]
            alone = read_only(linear.outputs[0]) and read_only(gate.outputs[0], 2)
            alone = alone and read_only(sigmoid.outputs[0]) and read_only(silu.outputs[0])
            plain = steps_of(gate) == Form() and not form_of(linear).gate
            if of_one_input and alone and plain and outputs_of(gate) == outputs_of(linear):
                form = join(replace(form_of(linear), gate=1), [linear, gate])
                put_linear([linear, gate, sigmoid, silu, node], inputs_of([linear, gate]), form)
                return True
    return False


# A residual addition becomes the last step of the Linear node before it:
#
#     p = Linear(x, w, ...)       read by nothing else
#     y = Add(p, r)               or Add(r, p); r of the shape of p, computed
# =>  y = Linear(x, w, ..., r)    residual = 1


@at_every_node
def add_residual(node: ir.Node) -> bool:
    for linear, addend in operands(node, "Add"):
        product, form = linear.outputs[0], form_of(linear)
        # ONNX's Add would broadcast one row to all rows.
        same = known_shape(product) and known_shape(product) == known_shape(addend)
        if same and read_only(product) and not addend.is_initializer() and not form.residual:
            put_linear([linear, node], [*linear.inputs, addend], replace(form, residual=1))
            return True
    return False


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


def _heads(flat: ir.Value, apart: ir.Value) -> int:
    """Return the number H of heads if a Reshape is between `flat` [B, T, H D] and `apart` [B, T, H, D], otherwise 0."""
    one, other = dims(flat), dims(apart)
    known = len(one) == 3 and len(other) == 4 and None not in (*one, *other) and one[:2] == other[:2]
    heads = other[2] if known else 0
    return heads if isinstance(heads, int) else 0


@at_every_node
def split_output(node: ir.Node) -> bool:
    reshape = producer(node, 0, "Reshape") if permutes(node, HEADS_TO_FRONT) else None
    linear = linear_of(reshape, 0) if reshape is not None else None
    if reshape is None or linear is None:
        return False
    product, apart, form = linear.outputs[0], reshape.outputs[0], form_of(linear)
    if not read_only(product) or not read_only(apart) or form.output_heads != (0,) or not _heads(product, apart):
        return False
    put_linear([linear, reshape, node], linear.inputs, replace(form, output_heads=(_heads(product, apart),)))
    return True


@at_every_node
def read_heads(node: ir.Node) -> bool:
    reshape = producer(node, 0, "Reshape") if is_linear(node) else None
    transpose = producer(reshape, 0, "Transpose") if reshape is not None else None
    if reshape is None or transpose is None or not permutes(transpose, HEADS_TO_FRONT):
        return False
    flat, apart, form = reshape.outputs[0], transpose.outputs[0], form_of(node)
    if not read_only(flat) or not read_only(apart) or form.input_heads or not _heads(flat, apart):
        return False
    inputs = [transpose.inputs[0], *node.inputs[1:]]
    put_linear([transpose, reshape, node], inputs, replace(form, input_heads=_heads(flat, apart)))
    return True


# Linear nodes with one input, such as query, key and value projections, become one:
#
#     a = Linear(x, w, ...)       each with at most a bias and heads of its own; three at most
#     b = Linear(x, v, ...)       w and v of one type
# =>  a, b = Linear(x, w, ..., v, ...)


@at_every_node
def join_products(node: ir.Node) -> bool:
    data = node.inputs[0] if _is_plain(node) else None
    if data is None:
        return False
    others = [use.node for use in data.uses() if use.node is not node and use.idx == 0 and _is_plain(use.node)]
    linears = [node, *others][:MOST_PRODUCTS]
    if len(linears) == 1 or len({dtype_of(linear) for linear in linears}) > 1:
        return False
    forms = [form_of(linear) for linear in linears]
    heads, bias = (tuple(getattr(form, name)[0] for form in forms) for name in ("output_heads", "bias"))
    form = join(Form(output_heads=heads, bias=bias, rotated=(0,) * len(forms)), linears)
    put_linear(linears, inputs_of(linears), form, [linear.outputs[0] for linear in linears])
    return True


def _is_plain(node: ir.Node) -> bool:
    if not is_linear(node):
        return False
    form = steps_of(node)
    return form == Form(output_heads=form.output_heads[:1], bias=form.bias[:1])


# An RMSNorm becomes the first step of the only Linear node that reads its output:
#
#     n = RMSNormalization<axis = -1>(x, scale)       scale [inputs], of the type of x and of the weights
#     y = Linear(n, w, ...)
# =>  y = Linear(x, scale, w, ...)                    norm = 1, epsilon
#
# Linear always normalizes in float32, so the attribute stash_type of RMSNormalization has no effect.


@at_every_node
def add_norm(node: ir.Node) -> bool:
    norm = producer(node, 0, "RMSNormalization") if is_linear(node) else None
    if norm is None:
        return False
    data, scale = norm.inputs
    assert data is not None and scale is not None
    form, types = form_of(node), {data.dtype, scale.dtype, dtype_of(node)}
    last, axis = len(known_shape(data)) - 1, norm.attributes.get_int("axis", -1)
    of_whole_rows = last >= 1 and axis in (-1, last) and known_shape(scale) == known_shape(data)[-1:]
    if form.norm or form.input_heads or len(types) > 1 or not of_whole_rows or not read_only(norm.outputs[0]):
        return False
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    form = replace(form, norm=1, epsilon=float(f"{epsilon:.6g}"))
    put_linear([norm, node], [data, scale, *node.inputs[1:]], form, node.outputs)
    return True


# The rotary embedding of heads becomes the last step of the Linear node that computes the heads:
#
#     a, b = Linear(x, w, v, ...)                 a [B, H, T, D], read by nothing else
#     y = RotaryEmbedding(a, cosine, sine)        rotates elements f and f + D / 2 of a head together
# =>  y, b = Linear(x, w, v, ..., cosine, sine)   rotated = [1, 0]; cosine, sine [B, T, D / 2]
#
# A Linear node rotates all its rotated outputs by the same cosines and sines.


@at_every_node
def add_rotary(node: ir.Node) -> bool:
    linear = linear_of(node, 0) if is_op(node, "RotaryEmbedding") and len(node.inputs) == 3 else None
    if linear is None:
        return False
    heads, *angles = node.inputs
    assert heads is not None
    form, inputs, i = form_of(linear), list(linear.inputs), list(linear.outputs).index(heads)
    otherwise = any(node.attributes.get_int(name, 0) for name in ("interleaved", "rotary_embedding_dim"))
    apart = form.output_heads[i] and not (form.rotated[i] or form.gate or form.residual)
    by_same_angles = not any(form.rotated) or inputs[-2:] == angles
    if otherwise or not apart or not by_same_angles or not read_only(heads):
        return False
    rotated = tuple(int(was or j == i) for j, was in enumerate(form.rotated))
    rest = inputs[:-2] if any(form.rotated) else inputs
    outputs = [node.outputs[0] if output is heads else output for output in linear.outputs]
    put_linear([linear, node], [*rest, *angles], replace(form, rotated=rotated), outputs)
    return True
