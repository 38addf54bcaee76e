"""What a Linear or Experts node computes, read from its attributes, and the replacement of nodes by one Linear node."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir

from kvexport.export.passes import nodes as graph_nodes
from kvexport.export.passes.nodes import is_op, known_shape, producer
from kvexport.ops.experts import ExpertsForm
from kvexport.ops.linear import Form, linear_function
from kvexport.ops.onnx_function import DOMAIN

OP_TYPES = ("Linear", "AdaptedLinear")


def linear_functions(graph: ir.Graph) -> list[onnx.FunctionProto]:
    forms = {form_of(node) for node in graph if is_linear(node)}
    return [linear_function(form) for form in sorted(forms, key=lambda form: form.overload)]


def is_linear(node: ir.Node) -> bool:
    return any(is_op(node, op_type, DOMAIN) for op_type in OP_TYPES)


def linear_of(node: ir.Node, i: int) -> ir.Node | None:
    return next((x for op_type in OP_TYPES if (x := producer(node, i, op_type, DOMAIN)) is not None), None)


def form_of(linear: ir.Node) -> Form:
    return Form(**_attributes(linear, Form()))


def experts_form_of(node: ir.Node) -> ExpertsForm:
    return ExpertsForm(**_attributes(node, ExpertsForm()))


def _attributes(node: ir.Node, form: Form | ExpertsForm) -> dict[str, Any]:
    values = {name: node.attributes[name].value for name in vars(form) if name in node.attributes}
    return {name: tuple(x) if isinstance(x, (list, tuple)) else x for name, x in values.items()}


def steps_of(linear: ir.Node) -> Form:
    return replace(form_of(linear), packed=(), group=(), adapted=())


def join(form: Form, linears: Iterable[ir.Node]) -> Form:
    forms = [form_of(linear) for linear in linears]
    lists: dict[str, Any] = {
        name: tuple(x for one in forms for x in getattr(one, name) or (0,) * one.weights)
        for name in ("packed", "group", "adapted")
        if any(getattr(one, name) for one in forms)
    }
    return replace(form, **lists)


def inputs_of(linears: Sequence[ir.Node]) -> list[ir.Value | None]:
    adapted = [linear for linear in linears if form_of(linear).adapted]
    rows = [linear.inputs[1] for linear in adapted[:1]]
    return [linears[0].inputs[0], *rows, *(x for y in linears for x in y.inputs[1 + (y in adapted) :])]


def dtype_of(linear: ir.Node) -> ir.DataType | None:
    data = linear.inputs[0] if form_of(linear).packed else weight_of(linear)
    return data.dtype if data is not None else None


def weight_of(linear: ir.Node) -> ir.Value:
    form = form_of(linear)
    weight = linear.inputs[1 + form.norm + bool(form.adapted)]
    assert weight is not None
    return weight


def outputs_of(linear: ir.Node) -> int | str:
    return known_shape(weight_of(linear))[0]


def operands(node: ir.Node, op_type: str) -> list[tuple[ir.Node, ir.Value]]:
    """Return, for each input of an `op_type` node that a Linear node computes, that Linear node and the other input."""
    if not is_op(node, op_type) or len(node.inputs) != 2:
        return []
    pairs = [(linear_of(node, i), node.inputs[1 - i]) for i in (0, 1)]
    return [(linear, other) for linear, other in pairs if linear is not None and other is not None]


def put_linear(
    nodes: Sequence[ir.Node], inputs: Iterable[ir.Value | None], form: Form, outputs: Sequence[ir.Value] | None = None
) -> None:
    """Replace `nodes` of a graph by one new Linear node with the given inputs and form (its steps)."""
    attributes = ir.convenience.convert_attributes(form.attributes)
    linear = ir.Node(DOMAIN, form.op_type, list(inputs), attributes, overload=form.overload, num_outputs=form.count)
    graph_nodes.replace(nodes, linear, outputs)
