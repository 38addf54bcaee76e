"""The graph pass that fuses two products of a gated MLP, one under SiLU, into one Linear node with a gate.

    p = Linear(x, w)                up projection, perhaps with a bias; read only by the last Mul
    g = Linear(x, v)                gate projection, without further steps; read only by Mul and Sigmoid below
    s = Mul(g, Sigmoid(g))
    y = Mul(s, p)                   every Mul in either order
=>  y = Linear(x, w, v)             gate = 1
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import (
    READ_TWICE,
    form_of,
    inputs_of,
    join,
    linear_of,
    operands,
    outputs_of,
    put_linear,
    steps_of,
)
from kvexport.export.passes.nodes import is_op, read_only
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import Form


class Match(NamedTuple):
    """The nodes of a gated MLP: Linear nodes of its up and gate projection, the activation, and the product of both.

    SiLU consists of the nodes `sigmoid` and `silu` (the product of the gate and its sigmoid). If the activation is one
    node, and so not SiLU, that node is both `sigmoid` and `silu`.
    """

    linear: ir.Node
    gate: ir.Node
    sigmoid: ir.Node
    silu: ir.Node
    product: ir.Node


def pattern(node: ir.Node) -> list[Match]:
    matches = []
    for linear, other in operands(node, "Mul"):
        activation = other.producer()
        if activation is None:
            continue
        for gate, value in operands(activation, "Mul"):
            sigmoid = value.producer()
            if sigmoid is not None and is_op(sigmoid, "Sigmoid"):
                matches.append(Match(linear, gate, sigmoid, activation, node))
        if len(activation.inputs) == 1 and (source := linear_of(activation, 0)) is not None and source is not linear:
            matches.append(Match(linear, source, activation, activation, node))
    return matches


def check(match: Match) -> str:
    """Return why two matrix products of a gated MLP cannot become one Linear node; "" if they can.

    The Linear node would multiply the up projection by SiLU of the gate projection. They cannot be fused if they read
    different inputs or differ in size, or if other nodes read a value between them.
    """
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


def rewrite(match: Match) -> None:
    form = join(replace(form_of(match.linear), gate=1), [match.linear, match.gate])
    put_linear(
        [match.linear, match.gate, match.sigmoid, match.silu, match.product],
        inputs_of([match.linear, match.gate]),
        form,
    )


GATE = Rewrite("gate", pattern, check, rewrite)
