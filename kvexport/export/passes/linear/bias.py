"""The graph pass that makes a bias an input of its Linear node.

    p = Linear(x, w)        read by nothing else, nothing fused yet
    y = Add(p, b)           or Add(b, p); b an initializer [outputs]
=>  y = Linear(x, w, b)     bias = [1]
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import READ_TWICE, form_of, operands, outputs_of, put_linear, steps_of
from kvexport.export.passes.nodes import dims, known_shape, read_only, show
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import Form


class Match(NamedTuple):
    linear: ir.Node
    bias: ir.Value
    add: ir.Node


def pattern(node: ir.Node) -> list[Match]:
    return [Match(linear, other, node) for linear, other in operands(node, "Add") if other.is_initializer()]


def check(match: Match) -> str:
    """Return why an addition to a Linear node's output is not a bias; "" if it is.

    It is not if the addend does not have one number for each output, or if other nodes read the product.
    """
    if not read_only(match.linear.outputs[0]):
        return READ_TWICE
    if steps_of(match.linear) != Form():
        return f"its Linear does more already ({match.linear.overload})"
    outputs = outputs_of(match.linear)
    if known_shape(match.bias) != (outputs,):
        return f"{match.bias.name} has {show(dims(match.bias))}, not [{outputs}]"
    return ""


def rewrite(match: Match) -> None:
    form = replace(form_of(match.linear), bias=(1,))
    put_linear([match.linear, match.add], [*match.linear.inputs, match.bias], form)


BIAS = Rewrite("bias", pattern, check, rewrite)
