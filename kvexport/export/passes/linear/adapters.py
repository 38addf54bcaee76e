"""The graph pass that makes LoRA adapters a step of the Linear node whose product they change.

    p = Linear(x, w, ...)                   read by nothing else; it has at most a bias
    n = MatMul(x, Transpose(first))         first [rows, inputs]: the LoRA matrices A of all adapters
    y = Add(p, MatMul(Mul(n, r), second))   second [rows, outputs]: the LoRA matrices B, transposed and scaled
=>  y = Linear(x, r, w, ..., first, second)     adapted = [1], an AdaptedLinear

The input r [B, 1, rows] is 1 for the rows of the adapter that a batch lane uses, and 0 for all other rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import READ_TWICE, form_of, operands, outputs_of, put_linear, steps_of
from kvexport.export.passes.nodes import dims, known_shape, permutes, producer, read_only, show
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import Form


class Match(NamedTuple):
    linear: ir.Node
    data: ir.Value
    rows: ir.Value
    first: ir.Value
    second: ir.Value
    add: ir.Node


def pattern(node: ir.Node) -> list[Match]:
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
            matches.append(Match(linear, data, rows, first, second, node))
    return matches


def check(match: Match) -> str:
    """Return why two matrix products are not LoRA adapters of a Linear node; "" if they are.

    They are not if they read another input, if their shapes are not those of adapters, or if the Linear has further
    steps.
    """
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


def rewrite(match: Match) -> None:
    data, *others = match.linear.inputs
    form = replace(form_of(match.linear), adapted=(1,))
    put_linear([match.linear, match.add], [data, match.rows, *others, match.first, match.second], form)


ADAPTERS = Rewrite("adapters", pattern, check, rewrite)
