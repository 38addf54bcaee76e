"""The Experts nodes of a traced decoder: kvexport's operator for the experts of a mixture of experts.

The form of an Experts node (`ExpertsForm`) is its activation, gate and biases, and the formats of its packed weights.
The form decides the inputs of the node, and the ONNX function that the node names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from kvexport.export.passes.forms import experts_form_of
from kvexport.export.passes.nodes import is_op
from kvexport.export.passes.packed import TYPES
from kvexport.export.weights.computed import component_name
from kvexport.ops.experts import WEIGHTS, ExpertsForm
from kvexport.ops.onnx_function import DOMAIN
from kvexport.ops.packed import PackedFormat

TRACED = ExpertsForm(bias=1).inputs
"""The inputs of an Experts node in a trace; inputs that the node's form does not have are None."""


def finish_experts(graph: ir.Graph, packings: Mapping[str, PackedFormat]) -> list[ExpertsForm]:
    forms = set()
    for node in list(graph):
        if not is_op(node, "Experts", DOMAIN):
            continue
        form, inputs = _packed(graph, node, packings)
        assert len(inputs) == len(form.inputs), f"{node.name} has {len(inputs)} inputs"
        finished = ir.Node(
            DOMAIN, "Experts", inputs, ir.convenience.convert_attributes(form.attributes), overload=form.overload,
            name=node.name, version=node.version, num_outputs=1,
        )  # fmt: skip
        output, old = finished.outputs[0], node.outputs[0]
        output.name, output.shape, output.type = old.name, old.shape, old.type
        old.replace_all_uses_with(output, replace_graph_outputs=True)
        graph.insert_before(node, finished)
        graph.remove(node, safe=True)
        forms.add(form)
    return sorted(forms, key=lambda form: form.overload)


def is_experts_weight(graph: ir.Graph, name: str) -> bool:
    value = graph.initializers.get(name)
    return value is not None and any(is_op(node, "Experts", DOMAIN) for node, _ in value.uses())


def _packed(
    graph: ir.Graph, node: ir.Node, packings: Mapping[str, PackedFormat]
) -> tuple[ExpertsForm, Sequence[ir.Value]]:
    form = experts_form_of(node)
    inputs: list[ir.Value] = []
    packed, group = [], []
    for name, value in zip(TRACED, node.inputs, strict=False):
        if value is None:
            continue
        packing = packings.get(str(value.name)) if name in WEIGHTS else None
        if name in WEIGHTS:
            packed.append(0 if packing is None else packing.kind)
            group.append(0 if packing is None else packing.group)
        inputs += [value] if packing is None else _parts(graph, value, packing)
    if any(packed):
        form = replace(form, packed=tuple(packed), group=tuple(group))
    return form, inputs


def _parts(graph: ir.Graph, value: ir.Value, packing: PackedFormat) -> list[ir.Value]:
    """Replace the initializer of experts' weights by the tensors of its packed format, such as scales, without data."""
    assert value.shape is not None and value.name is not None
    experts, outputs, inputs = value.shape.numpy()
    del graph.initializers[value.name]
    parts = []
    for part, tensor in packing.tensors(experts * outputs, inputs).items():
        name = component_name(value.name, part)
        initializer = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape if part == "table" else (experts, outputs, tensor.shape[-1])),
            type=ir.TensorType(TYPES[tensor.dtype]),
        )
        graph.initializers[name] = initializer
        parts.append(initializer)
    return parts
