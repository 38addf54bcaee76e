"""The graph pass that turns a matrix product with a checkpoint's weight into a Linear node.

    t = Transpose<perm = [1, 0]>(w)     w an initializer [outputs, inputs], float32 or float16
    y = MatMul(x, t)
=>  y = Linear(x, w)

    where w is a packed weight, dequantized as `kvexport.export.passes.packed` writes it
=>  y = Linear(x, weight, scale, zero or minimum)       packed = [1, 2 or 3], group
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import put_linear
from kvexport.export.passes.nodes import dims, is_op, known_shape, permutes, producer, show
from kvexport.export.passes.packed import Packed, packed_of
from kvexport.export.passes.report import Rewrite
from kvexport.ops.linear import PACKED, Form

TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
INTEGERS = (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8)


class Match(NamedTuple):
    """The matched MatMul and Transpose, the two factors, and the packed weight if the second factor is one."""

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
    """Return why a matrix product cannot be a Linear node; empty if it can.

    The reason: its second factor is not a weight in the checkpoint's dimension order [outputs, inputs].
    """
    if not permutes(match.transpose, [1, 0]):
        return "its second factor is not the transpose of a matrix"
    if match.packed is not None:
        return _wrong_packing(match.packed)
    if not match.weight.is_initializer():
        return f"{match.weight.name} is computed, not a weight"
    return "" if match.weight.dtype in TYPES else f"{match.weight.name} is {match.weight.dtype}, not float32 or float16"


def rewrite(match: Match) -> None:
    """Replace a MatMul and the Transpose of its weight by one Linear node."""
    if match.packed is None:
        return put_linear([match.transpose, match.product], [match.data, match.weight], Form())
    components = _components(match.packed)
    form = Form(packed=(PACKED.index(tuple(list(components)[1:])),), group=(match.packed.group,))
    return put_linear([match.transpose, match.product], [match.data, *components.values()], form)


def _components(packed: Packed) -> dict[str, ir.Value]:
    components = {"weight": packed.weight, "scale": packed.scale, "zero": packed.zero, "minimum": packed.minimum}
    return {name: value for name, value in components.items() if value is not None}


def _wrong_packing(packed: Packed) -> str:
    """Return why a Linear node cannot take a packed weight of this format; empty if it can."""
    components = _components(packed)
    computed = [value.name for value in components.values() if not value.is_initializer()]
    if computed:
        return f"{computed[0]} is computed, not a weight"
    if packed.zero is not None and packed.minimum is not None:
        return f"{packed.weight.name} has both a zero point and a minimum"
    types = {name: INTEGERS if name in ("weight", "zero") else TYPES for name in components}
    wrong = [value for name, value in components.items() if value.dtype not in types[name]]
    if wrong or (packed.zero is not None and packed.zero.dtype != packed.weight.dtype):
        stored_types = ", ".join(f"{name} {value.dtype}" for name, value in components.items())
        return f"{packed.weight.name} is packed as {stored_types}"
    outputs, inputs = known_shape(packed.weight) or ("", "")
    if not isinstance(inputs, int) or inputs % packed.group or packed.group % 2:
        return f"{packed.weight.name} has {show(dims(packed.weight))} in groups of {packed.group}"
    for name, value in components.items():
        if name != "weight" and known_shape(value) != (outputs, inputs // packed.group):
            return f"{value.name} has {show(dims(value))}, not [{outputs}, {inputs // packed.group}]"
    return ""


PRODUCT = Rewrite("product", pattern, check, rewrite)
