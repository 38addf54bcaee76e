"""Linear: a product with a weight as checkpoints hold it, ``torch.nn.functional.linear``, as a node of its own.

ONNX Runtime's CPU provider computes a MatMul with a transposed weight from a copy of that weight, of float32 whatever its type, and runs
every small operator around it as a node that costs as much as the product of one row. A kernel of this node reads the weight where the
checkpoint's [outputs, inputs] was mapped, and does what models do around products while they are at hand: a bias, SiLU's gate, a residual,
heads that become a dimension of their own and stop being one. A runtime without the kernel takes the function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
import onnx.parser
import onnx_ir as ir

from kvexport.ops.onnx_function import DOMAIN

TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
HEADS_LAST_TO_FIRST = [0, 2, 1, 3]  # [B, T, H, D] <-> [B, H, T, D]


@dataclass(frozen=True)
class Form:
    """What a Linear does beside its product. Heads are 0 where they are no dimension of their own; the flags say which inputs follow
    input and weight, in this order."""

    input_heads: int = 0
    output_heads: int = 0
    bias: int = 0
    gate: int = 0
    residual: int = 0

    @property
    def overload(self) -> str:
        """The name of its function."""
        return "_".join(f"{name}{value}" for name, value in vars(self).items() if value)


def linear_function(form: Form) -> onnx.FunctionProto:
    """The function of a Linear.

    input: [..., inputs], or [B, input_heads, T, inputs / input_heads]
    weight: [outputs, inputs]
    bias: [outputs]
    gate: [outputs, inputs]; what stands so far is multiplied with silu(input x gate^T)
    residual: [..., outputs], added last
    output: [..., outputs], or [B, output_heads, T, outputs / output_heads]; all of one dtype
    """
    inputs = ["input", "weight", *(name for name in ("bias", "gate", "residual") if getattr(form, name))]
    lines, rows, last = [], "input", "product"
    if form.input_heads:
        rows = "rows"
        lines += [
            "tokens_first = Transpose <perm = [0, 2, 1, 3]> (input)",
            "joined = Constant <value_ints = [0, 0, -1]> ()",
            "rows = Reshape (tokens_first, joined)",
        ]
    lines += ["transposed = Transpose <perm = [1, 0]> (weight)", f"product = MatMul ({rows}, transposed)"]
    if form.bias:
        lines += [f"biased = Add ({last}, bias)"]
        last = "biased"
    if form.gate:
        lines += [
            "gate_transposed = Transpose <perm = [1, 0]> (gate)",
            f"gate_product = MatMul ({rows}, gate_transposed)",
            "sigmoid = Sigmoid (gate_product)",
            "silu = Mul (gate_product, sigmoid)",
            f"gated = Mul (silu, {last})",
        ]
        last = "gated"
    if form.residual:
        lines += [f"sum = Add (residual, {last})"]
        last = "sum"
    if form.output_heads:
        lines += [
            f"apart = Constant <value_ints = [0, 0, {form.output_heads}, -1]> ()",
            f"heads = Reshape ({last}, apart)",
            "heads_first = Transpose <perm = [0, 2, 1, 3]> (heads)",
        ]
        last = "heads_first"
    body = "\n".join(lines)
    text = f'<domain: "{DOMAIN}", opset_import: ["": 23]>\nLinear ({", ".join(inputs)}) => ({last})\n{{\n{body}\n}}'
    function = onnx.parser.parse_function(text)
    function.overload = form.overload
    return function


def use_linear(graph: ir.Graph) -> list[onnx.FunctionProto]:
    """Products with the transpose of an initializer become Linear, with what is around them where the shapes leave no doubt of it; the
    functions of those in the graph."""
    for fold in (_product, _bias, _gate, _residual, _output_heads, _input_heads):
        for node in list(graph):
            if node.graph is not None:
                fold(node)
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
            return _replace([linear, node], [*linear.inputs, other], Form(bias=1))
    return None


def _gate(node: ir.Node) -> None:
    """(gate x sigmoid(gate)) x product, both products of one input"""
    for linear, other in _operands(node, "Mul"):
        silu = other.producer()
        if silu is None or not _is(silu, "Mul") or not _used_once(other) or linear.outputs[0] is other:
            continue
        for gate, value in _operands(silu, "Mul", uses=2):
            sigmoid = value.producer()
            if sigmoid is None or not _is(sigmoid, "Sigmoid") or sigmoid.inputs[0] is not gate.outputs[0] or not _used_once(value):
                continue
            same = gate.inputs[0] is linear.inputs[0] and gate is not linear and _outputs(gate) == _outputs(linear)
            if same and _form(gate) == Form() and not _form(linear).gate:
                form = Form(bias=_form(linear).bias, gate=1)
                return _replace([linear, gate, sigmoid, silu, node], [*linear.inputs, gate.inputs[1]], form)
    return None


def _residual(node: ir.Node) -> None:
    """product + x of one shape"""
    for linear, other in _operands(node, "Add"):
        form = _form(linear)
        if not form.residual and not other.is_initializer() and _shape(other) and _shape(other) == _shape(linear.outputs[0]):
            return _replace([linear, node], [*linear.inputs, other], Form(bias=form.bias, gate=form.gate, residual=1))
    return None


def _output_heads(node: ir.Node) -> None:
    """[B, T, H D] -> [B, T, H, D] -> [B, H, T, D]"""
    reshape = _maker(node, 0, "Reshape") if _permutes(node, HEADS_LAST_TO_FIRST) else None
    linear = _maker(reshape, 0, "Linear", DOMAIN) if reshape is not None and _used_once(reshape.outputs[0]) else None
    if reshape is None or linear is None or not _used_once(linear.outputs[0]):
        return
    flat, apart, form = _shape(linear.outputs[0]), _shape(reshape.outputs[0]), _form(linear)
    if len(flat) == 3 and len(apart) == 4 and flat[:2] == apart[:2] and isinstance(apart[2], int) and not form.output_heads:
        _replace([linear, reshape, node], linear.inputs, Form(form.input_heads, apart[2], form.bias, form.gate, form.residual))


def _input_heads(node: ir.Node) -> None:
    """[B, H, T, D] -> [B, T, H, D] -> [B, T, H D], into a product"""
    reshape = _maker(node, 0, "Reshape") if _is(node, "Linear", DOMAIN) else None
    swap = _maker(reshape, 0, "Transpose") if reshape is not None and _used_once(reshape.outputs[0]) else None
    if reshape is None or swap is None or not _permutes(swap, HEADS_LAST_TO_FIRST) or not _used_once(swap.outputs[0]):
        return
    apart, flat, form, heads_first = _shape(swap.outputs[0]), _shape(reshape.outputs[0]), _form(node), swap.inputs[0]
    if len(flat) == 3 and len(apart) == 4 and flat[:2] == apart[:2] and isinstance(apart[2], int) and not form.input_heads:
        inputs = [heads_first, *node.inputs[1:]]
        _replace([swap, reshape, node], inputs, Form(apart[2], form.output_heads, form.bias, form.gate, form.residual))


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
    """Of a node of two inputs: each that a Linear makes for it alone (or for as many `uses`), as that node, with the other input."""
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


def _outputs(linear: ir.Node) -> int | str | None:
    weight = linear.inputs[1]
    return _shape(weight)[0] if weight is not None else None


def _form(linear: ir.Node) -> Form:
    return Form(**{name: linear.attributes[name].as_int() for name in vars(Form())})


def _replace(nodes: list[ir.Node], inputs: Iterable[ir.Value | None], form: Form) -> None:
    """A Linear in the place of the last of `nodes`; those of the others that nothing else reads go."""
    last = nodes[-1]
    made, graph = last.outputs[0], last.graph
    linear = ir.Node(DOMAIN, "Linear", list(inputs), [ir.AttrInt64(k, v) for k, v in vars(form).items()], overload=form.overload)
    linear.name = last.name
    value = linear.outputs[0]
    value.name, value.shape, value.type = made.name, made.shape, made.type
    assert isinstance(graph, ir.Graph)
    graph.insert_after(last, linear)
    ir.convenience.replace_all_uses_with(made, value, replace_graph_outputs=True)
    for node in reversed(nodes):
        if not any(x.uses() for x in node.outputs):
            graph.remove(node, safe=True)
