"""Names of the nodes and values of a finished decoder's ONNX graph, which viewers of ONNX files show.

A node that reads weights of the checkpoint has the name of the weights' module, such as
model.layers.0.self_attn.o_proj; the modules of a Linear node with several products are joined by "+". Any other node is
named by the layer of the nodes before it and by its operator, such as model.layers.0.VoteAttention. A value has the
name of the node that computes it. A constant is named by its type and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

import onnx_ir as ir

from kvexport.export.passes.forms import form_of, is_linear
from kvexport.ops.names import name_constants, unique_names

# The tracer names the weight of a module model.MODULE.weight. A packed weight consists of several tensors, whose names
# have one more part.
_WEIGHT = re.compile(r"model\.(?P<module>.+?)\.(?:weight|bias)(?:\..+)?")
_BLOCK = re.compile(r"(?P<block>.+?\.\d+)(?:\..*)?")
# Beginnings of names that the export gives to nodes; they name the weight or the KV cache of a node.
_GIVEN = ("adapters.", "cache.", "caches.", "kvexport.", "model.")


def name_nodes(graph: ir.Graph) -> None:
    """Name the nodes, values and constants of a decoder's graph in place, except inputs, outputs and weights."""
    given = [node for node in graph if str(node.name).startswith(_GIVEN)]
    constants = [
        value
        for value in graph.initializers.values()
        if not isinstance(value.const_value, ir.ExternalTensor) and not str(value.name).startswith(_GIVEN)
    ]
    kept = {*graph.inputs, *graph.outputs, *graph.initializers.values()} - set(constants)
    kept |= {value for node in given for value in node.outputs}
    unique, unique_node = unique_names(str(value.name) for value in kept), unique_names(str(x.name) for x in given)
    name_constants(constants, unique)
    block = ""
    for node in graph:
        if node in given:
            continue
        modules = _modules(node)
        if modules:
            found = _BLOCK.fullmatch(modules[0])
            block = found["block"] if found else ""
        node.name = unique_node(_joined(node, modules) or ".".join(filter(None, [block, node.op_type])))
        _name_outputs(node, modules, kept, unique)


def _name_outputs(node: ir.Node, modules: list[str], kept: Container[ir.Value], unique: Callable[[str], str]) -> None:
    by_module = is_linear(node) and len(modules) == len(node.outputs)
    for i, value in enumerate(node.outputs):
        if value not in kept:
            value.name = unique(modules[i] if by_module else str(node.name) if i == 0 else f"{node.name}.{i}")


def _modules(node: ir.Node) -> list[str]:
    norm = node.inputs[1] if is_linear(node) and form_of(node).norm else None
    names = [str(value.name) for value in node.inputs if value is not None and value is not norm]
    return list(dict.fromkeys(match["module"] for name in names if (match := _WEIGHT.fullmatch(name))))


def _joined(node: ir.Node, modules: list[str]) -> str:
    if not modules:
        return ""
    if not is_linear(node):
        return f"{modules[0]}.{node.op_type}"
    parents = {module.rpartition(".")[0] for module in modules}
    if len(parents) > 1:
        return "+".join(modules)
    return ".".join(filter(None, [*parents, "+".join(module.rpartition(".")[2] for module in modules)]))
