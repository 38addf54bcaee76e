"""The graph pass that casts float16 rows to float32 before an RMSNorm whose scale is float32.

    y = RMSNormalization(x, scale)      x float16, scale float32
=>  y = RMSNormalization(Cast<to = float32>(x), scale)

The exporter creates such norms for models that scale before they round (Gemma, Olmo 2). It omits the model's cast of
the rows, because the operator normalizes in float32 anyway. By ONNX's definition, however, the operator rounds to the
type of the rows before it scales. Its ONNX function also multiplies two types, which ONNX Runtime refuses.
"""

import onnx_ir as ir

from kvexport.export.passes.nodes import is_op
from kvexport.export.passes.rewrite import at_every_node


@at_every_node
def cast_norm_rows(norm: ir.Node) -> bool:
    if not is_op(norm, "RMSNormalization"):
        return False
    rows, scale, graph = norm.inputs[0], norm.inputs[1], norm.graph
    assert rows is not None and scale is not None and isinstance(graph, ir.Graph)
    if (rows.dtype, scale.dtype) != (ir.DataType.FLOAT16, ir.DataType.FLOAT):  # of other types no cast would be exact
        return False
    cast = ir.node("Cast", [rows], {"to": ir.DataType.FLOAT}, name=f"{norm.name}.rows")
    wide = cast.outputs[0]
    wide.name, wide.dtype, wide.shape = f"{norm.outputs[0].name}.rows", ir.DataType.FLOAT, rows.shape
    graph.insert_before(norm, cast)
    norm.replace_input_with(0, wide)
    return True
