"""The graph pass that turns a matrix product with a checkpoint's weight into a Linear node.

    t = Transpose<perm = [1, 0]>(w)     w an initializer [outputs, inputs], float32 or float16
    y = MatMul(x, t)
=>  y = Linear(x, w)

    where w is a packed weight, dequantized as `kvexport.export.passes.packed` writes it
=>  y = Linear(x, weight, scale, ...)       packed, group
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import put_linear
from kvexport.export.passes.nodes import is_op, permutes, producer
from kvexport.export.passes.packed import Packed, packed_of
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import Form

TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class Match(NamedTuple):
    transpose: ir.Node
    product: ir.Node
    data: ir.Value
    weight: ir.Value
    packed: Packed | None


def pattern(node: ir.Node) -> list[Match]:
    transpose = producer(node, 1, "Transpose") if is_op(node, "MatMul") else None
    if transpose is None:
        return []
    data, weight = node.inputs[0], transpose.inputs[0]
    return [Match(transpose, node, data, weight, packed_of(weight))] if data is not None and weight is not None else []


def check(match: Match) -> str:
    """Return why a matrix product cannot be a Linear node; "" if it can.

    It cannot if its second factor is not a weight in the checkpoint's dimension order [outputs, inputs].
    """
    if not permutes(match.transpose, [1, 0]):
        return "its second factor is not the transpose of a matrix"
    if match.packed is not None:
        return ""
    if not match.weight.is_initializer():
        return f"{match.weight.name} is computed, not a weight"
    return "" if match.weight.dtype in TYPES else f"{match.weight.name} is {match.weight.dtype}, not float32 or float16"


def rewrite(match: Match) -> None:
    if match.packed is None:
        return put_linear([match.transpose, match.product], [match.data, match.weight], Form())
    packing, parts = match.packed
    form = Form(packed=(packing.kind,), group=(packing.group,))
    return put_linear([match.transpose, match.product], [match.data, *parts], form)


PRODUCT = Rewrite("product", pattern, check, rewrite)
