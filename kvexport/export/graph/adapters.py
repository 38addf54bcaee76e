"""LoRA adapters in a traced decoder: nodes that add each adapter's change to the output of a projection.

    p = MatMul(x, Transpose(w))
=>  y = Add(p, MatMul(Mul(MatMul(x, Transpose(first)), adapter_rows), second))

Here x is the projection's input, w its weight [outputs, inputs], and p its output, to which a bias may have been added.
The LoRA matrices are inputs of the ONNX graph. `first` [R, inputs] is the LoRA matrices A of all adapters, one below
the other, where R is the sum of the adapters' ranks. `second` [R, outputs] is their matrices B, transposed and scaled.
`adapter_rows` [B, 1, R] is 1 at the ranks of the adapter that a batch lane uses, and 0 at all others.
"""

import re
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvexport.backends.adapters import ROWS, first_input, second_input
from kvexport.errors import UsageError
from kvexport.export.model.probe import probe_layers
from kvexport.export.passes.nodes import dims, is_op, known_shape, permutes
from kvexport.tensor_files.shards import some_names

# The name of a weight of a numbered layer. The output head and the embeddings, which belong to no layer, take no
# adapters.
_MODULE = re.compile(r".+\.\d+\..+")
_WEIGHT = re.compile(rf"model\.(?P<module>{_MODULE.pattern})\.weight")


def put_adapters(graph: ir.Graph, targets: Sequence[str] | None) -> dict[str, tuple[int, int]]:
    rows = known_shape(graph.inputs[0])  # [batch, tokens]
    products = {module: node for node in graph for module in [_projection(node, rows)] if module}
    names = {module.rpartition(".")[2] for module in products}
    if unknown := sorted(set(targets or ()) - names) or ([] if names else ["*"]):
        raise UsageError(
            f"adapters.targets names {some_names(unknown)}; the projections of this model that take adapters are "
            f"{', '.join(sorted(names)) or 'none'}",
            f"--set 'adapters.targets=[{', '.join(sorted(names))}]'" if names else "--set adapters.count=0",
        )
    taken = {m: node for m, node in products.items() if targets is None or m.rpartition(".")[2] in targets}
    mask = ir.Value(name=ROWS, shape=ir.Shape([rows[0], 1, ROWS]), type=_data(graph, taken).type)
    graph.inputs.append(mask)
    return {module: _put(graph, module, node, mask) for module, node in taken.items()}


def projection_sizes(
    model: torch.nn.Module, mode: FakeTensorMode, targets: Sequence[str] | None
) -> dict[str, tuple[int, int]]:
    """Return the (inputs, outputs) of each projection of an untraced model that receives [batch, tokens, inputs]."""
    sizes: dict[str, tuple[int, int]] = {}

    def hook(name: str) -> Callable[[torch.nn.Linear, tuple[torch.Tensor, ...]], None]:
        def record(module: torch.nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
            if arguments[0].dim() == 3:
                sizes[name] = module.in_features, module.out_features

        return record

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and _MODULE.fullmatch(name)
        and (targets is None or name.rpartition(".")[2] in targets)
    ]
    try:
        probe_layers(model, mode)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _projection(node: ir.Node, rows: tuple[int | str, ...]) -> str:
    """Return the name of the projection that an ONNX node computes, such as "layers.0.mlp.up_proj"; "" if none."""
    if not is_op(node, "MatMul") or known_shape(node.inputs[0])[:-1] != rows:
        return ""
    transpose = node.inputs[1].producer() if node.inputs[1] is not None else None
    weight = transpose.inputs[0] if transpose is not None and permutes(transpose, [1, 0]) else None
    match = _WEIGHT.fullmatch(str(weight.name)) if weight is not None and weight.is_initializer() else None
    return match["module"] if match else ""


def _data(graph: ir.Graph, products: dict[str, ir.Node]) -> ir.Value:
    value = next(iter(products.values())).inputs[0]
    assert value is not None
    return value


def _put(graph: ir.Graph, module: str, product: ir.Node, mask: ir.Value) -> tuple[int, int]:
    data, after = product.inputs[0], _with_bias(product)
    assert data is not None
    inputs, outputs = dims(data)[-1], dims(product.outputs[0])[-1]
    assert isinstance(inputs, int) and isinstance(outputs, int)
    first = ir.Value(name=first_input(module), shape=ir.Shape([ROWS, inputs]), type=data.type)
    second = ir.Value(name=second_input(module), shape=ir.Shape([ROWS, outputs]), type=data.type)
    graph.inputs.extend([first, second])
    old, name = after.outputs[0], f"adapters.{module}"
    nodes: list[ir.Node] = []

    def add(op_type: str, operands: list[ir.Value], last: list[int | str | None], **attributes: list[int]) -> ir.Value:
        node = ir.node(op_type, operands, attributes, name=f"{name}.{len(nodes)}")
        value = node.outputs[0]
        leading = [] if op_type == "Transpose" else list(dims(data))[:-1]
        value.name, value.shape, value.type = f"{name}.{len(nodes)}", ir.Shape([*leading, *last]), data.type
        nodes.append(node)
        return value

    narrow = add("MatMul", [data, add("Transpose", [first], [inputs, ROWS], perm=[1, 0])], [ROWS])
    change = add("MatMul", [add("Mul", [narrow, mask], [ROWS]), second], [outputs])
    users = list(old.uses())
    result = add("Add", [old, change], [outputs])
    for use in users:
        use.node.replace_input_with(use.idx, result)
    graph.insert_after(after, nodes)
    return inputs, outputs


def _with_bias(product: ir.Node) -> ir.Node:
    uses = list(product.outputs[0].uses())
    node = uses[0].node if len(uses) == 1 else product
    biased = is_op(node, "Add") and any(x is not None and x.is_initializer() and len(dims(x)) == 1 for x in node.inputs)
    return node if biased else product
