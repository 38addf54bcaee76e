"""A product with a checkpoint's weight becomes a Linear.

    t = Transpose<perm = [1, 0]>(w)     w an initializer [outputs, inputs], float32 or float16
    y = MatMul(x, t)
=>  y = Linear(x, w)
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import put_linear
from kvexport.export.passes.nodes import is_op, permutes, producer
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import Form

TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class Match(NamedTuple):
    """The nodes, and the two values that they multiply."""

    transpose: ir.Node
    product: ir.Node
    data: ir.Value
    weight: ir.Value


def pattern(node: ir.Node) -> list[Match]:
    """A MatMul with a transpose."""
    transpose = producer(node, 1, "Transpose") if is_op(node, "MatMul") else None
    if transpose is None:
        return []
    data, weight = node.inputs[0], transpose.inputs[0]
    return [Match(transpose, node, data, weight)] if data is not None and weight is not None else []


def check(match: Match) -> str:
    """Only a weight of the checkpoint, as it lies there."""
    if not permutes(match.transpose, [1, 0]):
        return "its second factor is not the transpose of a matrix"
    if not match.weight.is_initializer():
        return f"{match.weight.name} is computed, not a weight"
    return "" if match.weight.dtype in TYPES else f"{match.weight.name} is {match.weight.dtype}, not float32 or float16"


def rewrite(match: Match) -> None:
    """See the module."""
    put_linear([match.transpose, match.product], [match.data, match.weight], Form())


PRODUCT = Rewrite("product", pattern, check, rewrite)
