"""The graph pass that fuses Linear nodes with one input, such as query, key and value projections, into one Linear.

    a = Linear(x, w, ...)       each with at most a bias and heads of its own; three at most
    b = Linear(x, v, ...)       w and v of one type
=>  a, b = Linear(x, w, ..., v, ...)
"""

from __future__ import annotations

import onnx_ir as ir

from kvexport.export.passes.linear.forms import dtype_of, form_of, inputs_of, is_linear, join, put_linear, steps_of
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import Form

MOST_PRODUCTS = 3  # the most matrix products of one Linear node
Match = list[ir.Node]  # Linear nodes that read the same input


def pattern(node: ir.Node) -> list[Match]:
    data = node.inputs[0] if _is_plain(node) else None
    if data is None:
        return []
    others = [use.node for use in data.uses() if use.node is not node and use.idx == 0 and _is_plain(use.node)]
    return [[node, *others][:MOST_PRODUCTS]] if others else []


def check(match: Match) -> str:
    """Return why Linear nodes cannot become one: the types of their weights, if these differ; "" if they can."""
    types = list(dict.fromkeys(dtype_of(linear) for linear in match))
    return "" if len(types) == 1 else f"the weights of its input's products are {' and '.join(map(str, types))}"


def rewrite(match: Match) -> None:
    forms = [form_of(linear) for linear in match]
    heads, bias = (tuple(getattr(form, name)[0] for form in forms) for name in ("output_heads", "bias"))
    form = join(Form(output_heads=heads, bias=bias, rotated=(0,) * len(forms)), match)
    put_linear(match, inputs_of(match), form, [linear.outputs[0] for linear in match])


def _is_plain(node: ir.Node) -> bool:
    if not is_linear(node):
        return False
    form = steps_of(node)
    return form == Form(output_heads=form.output_heads[:1], bias=form.bias[:1])


SHARED_INPUT = Rewrite("shared input", pattern, check, rewrite)
