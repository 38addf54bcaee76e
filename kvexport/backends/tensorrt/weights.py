"""The packed (4-bit) weights that TensorRT dequantizes within a matrix product.

TensorRT takes signed 4-bit codes in blocks of 64 or 128 inputs with scales above 0. Its IDequantizeLayer supports no
blocks of INT8, no zero points other than 0, and only positive scales (NvInfer.h of 11.1). The block sizes come from
TensorRT's documentation of quantization schemes. TensorRT's parser lacks the ONNX operator BitShift, so it cannot read
single rows of a packed embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvexport.backends.tensorrt.plugin import NAMESPACE
from kvexport.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import onnx
    from numpy.typing import NDArray

BLOCKS = (64, 128)
PICKED = "TensorRT does not pick rows of packed weights"
TABLE = "TensorRT takes no packed weights with a table of numbers"


def problem(dtype: str, group: int, *, has_offset: bool) -> str:
    if dtype != "int4" or has_offset:
        return "TensorRT takes only int4, without zero points and minima"
    if group not in BLOCKS:
        return f"TensorRT takes only groups of {' and '.join(map(str, BLOCKS))} inputs"
    return ""


def require_taken(model: onnx.ModelProto, folder: Path) -> None:
    import onnx

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    cast_of = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    packed = {getattr(onnx.TensorProto, name) for name in ("INT4", "UINT4", "INT8", "UINT8")}
    readers = [
        (node, name)
        for node in model.graph.node
        for name in node.input[:1]
        if node.domain != NAMESPACE and name in tensors and tensors[name].data_type in packed
    ]
    for node, weight in readers:
        dtype = onnx.TensorProto.DataType.Name(tensors[weight].data_type).lower()
        in_groups = node.op_type == "DequantizeLinear"
        if in_groups:
            _, scale, *zero = node.input
            group = next((a.i for a in node.attribute if a.name == "block_size"), 0)
            why = problem(dtype, group, has_offset=bool(zero))
            if not why and not (_values(tensors[cast_of.get(scale, scale)], folder) > 0).all():
                why = "TensorRT takes only scales above 0"
        else:
            why = PICKED if node.op_type == "Gather" else TABLE
        if not why:
            continue
        text = f"{weight} has {dtype} numbers{f' in groups of {group}' if in_groups else ''}: {why}"
        raise UsageError(
            text, "kvexport build MODEL --backend tensorrt, without --from, which keeps such weights in floats"
        )


def _values(tensor: onnx.TensorProto, folder: Path) -> NDArray[Any]:
    import onnx

    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)  # to_array loads external data into its argument
    return onnx.numpy_helper.to_array(copy, str(folder))


def with_typed_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change every DequantizeLinear node of `model` to return the final type directly, and return `model`.

    The node computed in float32, and a CastLike node after it, which is removed, changed the type. With float16 scales
    the values stay the same, because the product of a number of 4 bits and a float16 with 11 bits is exact in float32.
    float16 scales of a float32 weight are cast, because TensorRT wants scales of the result's type.
    """
    import onnx

    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    graph = model.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in graph.input}
    producers = {output: node for node in graph.node for output in node.output}
    kept, casts = [], []
    for node in graph.node:
        weight = producers.get(node.input[0]) if node.op_type == "CastLike" else None
        if weight is None or weight.op_type != "DequantizeLinear":
            kept.append(node)
            continue
        dtype = _type_of(node.input[1], producers, types)
        next(a for a in weight.attribute if a.name == "output_dtype").i = dtype
        weight.output[0] = node.output[0]
        scale = weight.input[1]
        if types[scale] == half and dtype == single:
            weight.input[1] = f"{node.output[0]}_scale"
            casts.append(onnx.helper.make_node("Cast", [scale], [weight.input[1]], to=single))
    del graph.node[:]
    graph.node.extend([*casts, *kept])
    return model


def _type_of(value: str, producers: Mapping[str, onnx.NodeProto], types: Mapping[str, int]) -> int:
    while value not in types:
        node = producers[value]
        if node.op_type == "Cast":
            return int(next(a.i for a in node.attribute if a.name == "to"))
        value = node.input[1 if node.op_type in ("CastLike", "Where") else 0]
    return types[value]
