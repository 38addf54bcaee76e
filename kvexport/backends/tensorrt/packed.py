"""Packed weights of Experts nodes as TensorRT's plugins take them: tensors of bytes.

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

EXPERTS = "Experts"
FIRST = 3  # the input of an Experts node that is its first weight
AFTER = (0, 1, 2, 2, 2, 2)  # the inputs that follow a packed weight, by its number in the attribute `packed`
WITH_ZERO = 2  # the number of a weight that a scale and a zero point follow


def add_byte_fields(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> None:
    """Add the attributes `bits` and `signed` to an Experts node with packed weights: the integers of each weight.

    Args:
        node: The node; one without packed weights stays as it is.
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
    """Change the types and shapes of an Experts node's packed weights to those of their bytes. No data changes.

    The last dimension of a weight becomes its bytes. Zero points become one dimension, because their rows may not end
    with a whole byte.

    Args:
        node: The node.
        tensors: The graph's initializers by their names. No other node reads those of the weights.
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
    """Yield for both weights of an Experts node the number of its input, and of its packing; nothing if none is packed.

    The attribute `packed` has the number of a packing.
    """
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if "packed" not in attributes:
        return
    at, bias = FIRST, attributes["bias"].i
    for kind in attributes["packed"].ints:
        yield at, kind
        at += 1 + AFTER[kind] + bias


def _bits(data_type: int) -> int | None:
    """Return the bits of an integer of a packed weight; None for another type."""
    import onnx

    of = onnx.TensorProto
    bits: dict[int, int] = {of.INT4: 4, of.UINT4: 4, of.INT8: 8, of.UINT8: 8}
    return bits.get(data_type)
