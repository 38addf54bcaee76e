"""Packed weights as TensorRT takes them: signed numbers of 4 bits in blocks of 64 or 128 inputs, each with a scale
above 0, and nothing beside it.

IDequantizeLayer has no blocks of INT8, its zero points are 0 and its scales strictly positive (NvInfer.h of 11.1); the
sizes of blocks are those of its documentation of quantization schemes; its parser has no BitShift, by which a packed
embedding is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvexport.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import onnx
    from numpy.typing import NDArray

BLOCKS = (64, 128)
FIX = "--set weights.bits=4 --set weights.group=128 --set weights.symmetric=true"


def problem(dtype: str, group: int, *, has_offset: bool, picked: bool = False) -> str:
    """Why TensorRT does not take a weight of this type with a scale for each `group` inputs; empty where it does.
    has_offset: zero points or minima stand beside the scales. picked: single rows of it are read."""
    if picked:
        return "TensorRT does not pick rows of packed weights"
    if dtype != "int4" or has_offset:
        return "TensorRT takes groups of int4 alone, without zero points and minima"
    if group not in BLOCKS:
        return f"TensorRT takes groups of {' and '.join(map(str, BLOCKS))} alone"
    return ""


def require_taken(model: onnx.ModelProto, folder: Path) -> None:
    """Raises UsageError for a packed weight of a graph that TensorRT does not take. folder: of its external data."""
    import onnx

    held = {tensor.name: tensor for tensor in model.graph.initializer}
    cast_of = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    for node in model.graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        weight, scale, *zero = node.input
        dtype = onnx.TensorProto.DataType.Name(held[weight].data_type).lower()
        group = next((a.i for a in node.attribute if a.name == "block_size"), 0)
        why = problem(dtype, group, has_offset=bool(zero))
        if not why and not (_values(held[cast_of.get(scale, scale)], folder) > 0).all():
            why = "TensorRT takes scales above 0 alone"
        if why:
            raise UsageError(
                f"{weight} is of {dtype} in groups of {group}: {why}",
                "kvexport build --recipe NAME --backend tensorrt, without --from, which keeps such weights in floats",
            )


def _values(tensor: onnx.TensorProto, folder: Path) -> NDArray[Any]:
    import onnx

    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)  # which then holds its data
    return onnx.numpy_helper.to_array(copy, str(folder))


def with_typed_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, changed: a DequantizeLinear gives what the CastLike behind it made of its float32, which is left out. Of
    scales in float16 the values are the same: the product of 4 bits and 11 is exact in float32. Scales in float16 of a
    weight in float32 are cast, because these have to be of the type that is made."""
    import onnx

    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    graph = model.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in graph.input}
    made = {output: node for node in graph.node for output in node.output}
    kept, casts = [], []
    for node in graph.node:
        weight = made.get(node.input[0]) if node.op_type == "CastLike" else None
        if weight is None or weight.op_type != "DequantizeLinear":
            kept.append(node)
            continue
        dtype = _type_of(node.input[1], made, types)
        next(a for a in weight.attribute if a.name == "output_dtype").i = dtype
        weight.output[0] = node.output[0]
        scale = weight.input[1]
        if types[scale] == half and dtype == single:
            weight.input[1] = f"{node.output[0]}_scale"
            casts.append(onnx.helper.make_node("Cast", [scale], [weight.input[1]], to=single))
    del graph.node[:]
    graph.node.extend([*casts, *kept])
    return model


def _type_of(value: str, made: Mapping[str, onnx.NodeProto], types: Mapping[str, int]) -> int:
    """The type of a value of the graph, by way of what it is computed from: rows keep theirs until a Cast."""
    while value not in types:
        node = made[value]
        if node.op_type == "Cast":
            return int(next(a.i for a in node.attribute if a.name == "to"))
        value = node.input[1 if node.op_type in ("CastLike", "Where") else 0]
    return types[value]
