"""Packed weights of Linear and Experts nodes as TensorRT's plugins take them: tensors of bytes.

A plugin of TensorRT has neither unsigned inputs nor inputs of 4 bits (NvInferRuntimePlugin.h of 11.1), and TensorRT's
parser turns a UINT8 initializer into INT32. So the parts of a packed weight that are no floats become INT8
initializers with the same bytes, and two attributes tell what the bytes are. plugins/bindings/tensorrt/weight.h reads
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

LINEAR, EXPERTS = "Linear", "Experts"
AFTER = (0, 1, 2, 2, 2, 2)  # the inputs that follow a packed weight, by its number in the attribute `packed`
WITH_ZERO = 2  # the number of a weight that a scale and a zero point follow


def is_packed(node: onnx.NodeProto) -> bool:
    """Return whether a Linear or Experts node has packed weights."""
    return any(attribute.name == "packed" for attribute in node.attribute)


def add_byte_fields(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> None:
    """Add the attributes `bits` and `signed` to a node with packed weights: the integers of each weight.

    Args:
        node: A Linear or Experts node; one without packed weights stays as it is.
        tensors: The graph's initializers by their names, with the types that the artifact has.
    """
    import onnx

    weights = list(_packed_weights(node))
    if not weights:
        return
    kinds = [tensors[node.input[at]].data_type if kind else None for at, kind in weights]
    signed = (onnx.TensorProto.INT4, onnx.TensorProto.INT8)
    node.attribute.append(onnx.helper.make_attribute("bits", [_bits(kind) if kind else 0 for kind in kinds]))
    node.attribute.append(onnx.helper.make_attribute("signed", [int(kind in signed) for kind in kinds]))


def as_bytes(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> None:
    """Change the types and shapes of a node's packed weights to those of their bytes. No data changes.

    The last dimension of a weight becomes its bytes. Zero points become one dimension, because their rows may not end
    with a whole byte. A tensor that several plugins read is changed once.

    Args:
        node: A Linear or Experts node.
        tensors: The graph's initializers by their names. No node but plugins reads those of the weights.
    """
    import onnx

    for at, kind in _packed_weights(node):
        for part, name in enumerate(node.input[at : at + 1 + AFTER[kind]] if kind else ()):
            tensor = tensors[name]
            if (bits := _bits(tensor.data_type)) is None:  # a scale or a minimum
                continue
            if kind == WITH_ZERO and part == 2:
                tensor.dims[:] = [-(-math.prod(tensor.dims) * bits // 8)]
            else:
                tensor.dims[-1] = tensor.dims[-1] * bits // 8
            tensor.data_type = onnx.TensorProto.INT8


def _packed_weights(node: onnx.NodeProto) -> Iterator[tuple[int, int]]:
    """Yield for each weight of a node the number of its input, and of its packing; nothing if none is packed.

    The attribute `packed` has the number of a packing.
    """
    import onnx

    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    if "packed" not in values:
        return
    if node.op_type == LINEAR:
        at, biases = 1 + values["norm"], [*values["bias"], 0]  # the gate has no bias
    else:
        at, biases = 3, [values["bias"]] * 2
    for kind, bias in zip(values["packed"], biases, strict=False):
        yield at, kind
        at += 1 + AFTER[kind] + bias


def _bits(data_type: int) -> int | None:
    """Return the bits of an integer of a packed weight; None for another type."""
    import onnx

    of = onnx.TensorProto
    bits: dict[int, int] = {of.INT4: 4, of.UINT4: 4, of.INT8: 8, of.UINT8: 8}
    return bits.get(data_type)
