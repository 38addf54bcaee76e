"""Linear: ``torch.nn.functional.linear`` without a bias, ``input @ weight.T``, as a node of its own.

Of float16 alone: ONNX Runtime's CPU provider computes a MatMul of float16 by making float32 of its weight when the session is made, so
that every step moves twice the bytes. A kernel of this node reads the weight as it is, where the checkpoint's [outputs, inputs] was mapped.
A runtime without one takes the function. A MatMul of float32 stays: it runs as fast as memory, and long prompts faster than the kernel.
"""

from __future__ import annotations

import onnx
import onnx.parser

from kvexport.ops.onnx_function import DOMAIN

FUNCTION = """<domain: "kvexport", opset_import: ["": 23]>
Linear (input, weight) => (output) {
    transposed = Transpose <perm = [1, 0]> (weight)
    output = MatMul (input, transposed)
}"""


def linear_function() -> onnx.FunctionProto:
    """The function of every Linear: input [..., inputs], weight [outputs, inputs] -> output [..., outputs], all of one dtype."""
    return onnx.parser.parse_function(FUNCTION)


def use_linear(graph: onnx.GraphProto) -> bool:
    """Every product with the transpose of a float16 initializer becomes a Linear; whether there was one."""
    initializers = {x.name for x in graph.initializer if x.data_type == onnx.TensorProto.FLOAT16}
    weights = {node.output[0]: node.input[0] for node in graph.node if _transposes(node) and node.input[0] in initializers}
    products = [node for node in graph.node if node.op_type == "MatMul" and not node.domain and node.input[1] in weights]
    for node in products:
        node.op_type, node.domain = "Linear", DOMAIN
        node.input[1] = weights[node.input[1]]
    read = {name for node in graph.node for name in node.input} | {x.name for x in graph.output}
    kept = [node for node in graph.node if node.output[0] not in weights or node.output[0] in read]
    del graph.node[:]
    graph.node.extend(kept)
    return bool(products)


def _transposes(node: onnx.NodeProto) -> bool:
    """Whether it swaps the two dimensions of a matrix."""
    return node.op_type == "Transpose" and any(list(a.ints) == [1, 0] for a in node.attribute if a.name == "perm")
