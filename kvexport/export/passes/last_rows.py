"""The graph pass that selects the last token's row right after the last layer's attention.

    m = ... Linear(...), norms, residuals ...       [B, T, C], each row computed by itself; nothing else reads it
    y = GatherElements<axis = 1>(m, Expand(row))    row [B, 1, 1]: one row of every sequence, [B, 1, C]
=>  y = ... Linear(...), norms, residuals ...       [B, 1, C]; a GatherElements picks the row of each of their inputs

A decoder that returns only the logits of the last token ends with these nodes. Of each chunk of a prompt, only one row
of every sequence is then computed by the nodes after the last attention (output projection, norms, MLP, residuals).
"""

import numpy as np
import onnx_ir as ir

from kvexport.export.passes.forms import OP_TYPES, form_of, is_linear
from kvexport.export.passes.nodes import Dims, dims, is_op
from kvexport.export.passes.rewrite import at_every_node

PRODUCTS = {*OP_TYPES, "MatMul"}
# Operators that compute each row of their first input by itself, along the last axis
ALONG_ROWS = {"RMSNormalization", "LayerNormalization", "Split"}
ELEMENTWISE = {
    "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt",
    "Sub", "Sum", "Tanh",
}  # fmt: skip


@at_every_node
def pick_last_rows(pick: ir.Node) -> bool:
    along_tokens = is_op(pick, "GatherElements") and pick.attributes.get_int("axis", 0) == 1
    if not along_tokens or pick.outputs[0].is_graph_output():
        return False
    data, index = pick.inputs
    expand = index.producer() if index is not None else None
    row = expand.inputs[0] if expand is not None and is_op(expand, "Expand") else None
    shape, picked = dims(data), dims(pick.outputs[0])
    if data is None or row is None or len(shape) != 3 or None in shape:
        return False
    one_of_every_sequence = dims(row) == (shape[0], 1, 1) and picked == (shape[0], 1, shape[2])
    moved = _movable(pick, data) if one_of_every_sequence else {}
    # The values that nodes of `moved` read row by row and do not compute; a row of each of them is picked.
    sources = list(dict.fromkeys(x for inputs in moved.values() for x in inputs if x.producer() not in moved))
    known = all(isinstance(dims(value)[-1], int) for value in sources)
    if not known or not any(node.op_type in PRODUCTS for node in moved):
        return False
    graph = pick.graph
    assert isinstance(graph, ir.Graph)
    for value in sources:
        one = _row_of(graph, value, row)
        for use in list(value.uses()):
            if use.node in moved:
                use.node.replace_input_with(use.idx, one)
    for value in [value for node in moved for value in node.outputs]:
        value.shape = _with_one_row(value)
    pick.outputs[0].replace_all_uses_with(data)
    graph.sort()
    return True


def _movable(pick: ir.Node, data: ir.Value) -> dict[ir.Node, list[ir.Value]]:
    """Return the nodes that need only the last token's row, from last to first, and the inputs they read by row."""
    graph = pick.graph
    assert isinstance(graph, ir.Graph)
    batch, tokens, _ = dims(data)
    selected: dict[ir.Node, list[ir.Value]] = {}
    for node in reversed(graph):
        readers = [use.node for value in node.outputs for use in value.uses()]
        kept = any(value.is_graph_output() for value in node.outputs)
        if readers and not kept and all(reader is pick or reader in selected for reader in readers):
            inputs = _row_inputs(node, (batch, tokens))
            if inputs:
                selected[node] = inputs
    return selected


def _row_inputs(node: ir.Node, rows: Dims) -> list[ir.Value]:
    """Return the inputs of which a node needs only row i to compute row i of its outputs; empty in case of doubt."""
    inputs = [value for value in node.inputs if value is not None]
    if not inputs or not all(_has_rows(value, rows) for value in node.outputs):
        return []
    first, others = inputs[0], inputs[1:]
    if is_linear(node):
        return _linear_row_inputs(node, rows)
    if node.domain:
        return []
    if node.op_type in ELEMENTWISE:
        reads = [value for value in inputs if _has_rows(value, rows)]
        return reads if all(value in reads or _same_for_all_rows(value) for value in inputs) else []
    if node.op_type == "MatMul":
        alone = len(dims(others[0])) == 2
    else:
        last_axis = node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1) in (-1, 2)
        alone = node.op_type in ALONG_ROWS and last_axis and all(_same_for_all_rows(value) for value in others)
    return [first] if alone and _has_rows(first, rows) else []


def _linear_row_inputs(node: ir.Node, rows: Dims) -> list[ir.Value]:
    form = form_of(node)
    if len(form.inputs) != len(node.inputs):
        return []
    inputs = {name: value for name, value in zip(form.inputs, node.inputs, strict=True) if value is not None}
    data, residual = inputs.pop("input"), [inputs.pop("residual")] if form.residual else []
    of_adapters = {"adapter_rows", *(name for i in range(form.weights) for name in form.adapter_inputs(i))}
    weights = [value for name, value in inputs.items() if name not in of_adapters]
    static = all(value.shape is not None and value.shape.is_static() for value in weights)
    heads, shape = form.input_heads, dims(data)
    of_heads = len(shape) == 4 and shape[:3] == (rows[0], heads, rows[1]) and isinstance(shape[3], int)
    right = (of_heads if heads else _has_rows(data, rows)) and all(_has_rows(value, rows) for value in residual)
    return [data, *residual] if static and right and len(node.outputs) == 1 else []


def _has_rows(value: ir.Value, rows: Dims) -> bool:
    shape = dims(value)
    return len(shape) == 3 and shape[:2] == rows and shape[2] is not None


def _same_for_all_rows(value: ir.Value) -> bool:
    """Return whether a value broadcasts along the tokens of [B, T, C], so that all rows share it."""
    shape = dims(value)
    return value.shape is not None and len(shape) <= 3 and (1, 1, *shape)[-2] == 1


def _row_of(graph: ir.Graph, value: ir.Value, row: ir.Value) -> ir.Value:
    """Add nodes that pick one token's row of a value [B, T, C] or [B, heads, T, D], and return the picked row.

    `row` [B, 1, 1] is the index of the token. GatherElements with an index for each element picks the row, because ONNX
    Runtime's CUDA provider cannot replay a GatherND in a CUDA graph: a GatherND reads memory that its first run has
    freed.
    """
    name, picked = str(value.name), _with_one_row(value)
    index = row
    if len(picked) == 4:
        axes = _initializer(graph, f"{name}.heads", [1])
        index = _append(graph, "Unsqueeze", [row, axes], f"{name}.rows", ir.Shape([picked[0], 1, 1, 1]), row.type)
    # The batch is 1 in these sizes, and broadcasts to the batch of the index.
    sizes = _initializer(graph, f"{name}.sizes", [1, *(size for size in picked[1:] if isinstance(size, int))])
    elements = _append(graph, "Expand", [index, sizes], f"{name}.elements", picked, row.type)
    return _append(graph, "GatherElements", [value, elements], f"{name}.row", picked, value.type, axis=len(picked) - 2)


def _initializer(graph: ir.Graph, name: str, numbers: list[int]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.array(numbers, np.int64), name=name))
    value.shape, value.dtype = ir.Shape([len(numbers)]), ir.DataType.INT64
    graph.register_initializer(value)
    return value


def _append(
    graph: ir.Graph,
    op_type: str,
    inputs: list[ir.Value],
    name: str,
    shape: ir.Shape,
    kind: ir.TypeProtocol | None,
    **attributes: int,
) -> ir.Value:
    node = ir.node(op_type, inputs, attributes, name=name)
    output = node.outputs[0]
    output.name, output.shape, output.type = name, shape, kind
    graph.append(node)
    return output


def _with_one_row(value: ir.Value) -> ir.Shape:
    shape = dims(value)
    return ir.Shape([*shape[:-2], 1, shape[-1]])
