"""The graph pass that casts float16 rows to float32 before an RMSNorm whose scale is float32.

    y = RMSNormalization(x, scale)      x float16, scale float32
=>  y = RMSNormalization(Cast<to = float32>(x), scale)

The exporter creates such norms for models that scale before they round (Gemma, Olmo 2). It omits the model's cast of
the rows, because the operator normalizes in float32 anyway. By ONNX's definition, however, the operator rounds to the
type of the rows before it scales. Its ONNX function also multiplies two types, which ONNX Runtime refuses.
"""

from __future__ import annotations

import onnx_ir as ir

from kvexport.export.passes.nodes import is_op
from kvexport.export.passes.report import Rewrite


def pattern(node: ir.Node) -> list[ir.Node]:
    if not is_op(node, "RMSNormalization"):
        return []
    rows, scale = _inputs(node)
    return [node] if rows.dtype != scale.dtype else []


def check(norm: ir.Node) -> str:
    """Return why rows cannot be cast to the type of their scale; only a cast from float16 to float32 is exact."""
    rows, scale = _inputs(norm)
    if (rows.dtype, scale.dtype) == (ir.DataType.FLOAT16, ir.DataType.FLOAT):
        return ""
    return f"its rows are {rows.dtype}, its scale {scale.dtype}"


def rewrite(norm: ir.Node) -> None:
    rows, graph = _inputs(norm)[0], norm.graph
    assert isinstance(graph, ir.Graph)
    cast = ir.node("Cast", [rows], {"to": ir.DataType.FLOAT}, name=f"{norm.name}.rows")
    wide = cast.outputs[0]
    wide.name, wide.dtype, wide.shape = f"{norm.outputs[0].name}.rows", ir.DataType.FLOAT, rows.shape
    graph.insert_before(norm, cast)
    norm.replace_input_with(0, wide)


def _inputs(norm: ir.Node) -> tuple[ir.Value, ir.Value]:
    rows, scale = norm.inputs
    assert rows is not None and scale is not None
    return rows, scale


NORM_TYPES = Rewrite("norm types", pattern, check, rewrite)
