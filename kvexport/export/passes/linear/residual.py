"""The graph pass that makes a residual addition the last step of the Linear node before it.

    p = Linear(x, w, ...)       read by nothing else
    y = Add(p, r)               or Add(r, p); r of the shape of p, computed
=>  y = Linear(x, w, ..., r)    residual = 1
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import READ_TWICE, form_of, operands, put_linear
from kvexport.export.passes.nodes import dims, known_shape, read_only, show
from kvexport.export.passes.report import Rewrite


class Match(NamedTuple):
    linear: ir.Node
    residual: ir.Value
    add: ir.Node


def pattern(node: ir.Node) -> list[Match]:
    return [Match(linear, other, node) for linear, other in operands(node, "Add") if not other.is_initializer()]


def check(match: Match) -> str:
    """Return why an addend is no residual of a Linear node; "" if it is one.

    The shapes of a residual and the product must be known and equal. (ONNX's Add would broadcast one row to all rows.)
    """
    product = match.linear.outputs[0]
    if not read_only(product):
        return READ_TWICE
    if form_of(match.linear).residual:
        return "its Linear has a residual already"
    if not known_shape(product) or known_shape(product) != known_shape(match.residual):
        return f"{match.residual.name} has {show(dims(match.residual))}, its product {show(dims(product))}"
    return ""


def rewrite(match: Match) -> None:
    form = replace(form_of(match.linear), residual=1)
    put_linear([match.linear, match.add], [*match.linear.inputs, match.residual], form)


RESIDUAL = Rewrite("residual", pattern, check, rewrite)
