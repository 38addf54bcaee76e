"""The Experts nodes (mixture of experts) of a traced decoder.

Each node gets the inputs of its form, which says what the experts compute, and the name of the ONNX function of that
form.
"""

from __future__ import annotations

import onnx_ir as ir

from kvexport.export.passes.nodes import is_op
from kvexport.ops.experts import ExpertsForm
from kvexport.ops.onnx_function import DOMAIN


def finish_experts(graph: ir.Graph) -> list[ExpertsForm]:
    """Name the ONNX function of every Experts node in a graph, and leave out the inputs that the node does not need.

    A node's form (what its experts compute between their two matrix products) decides on both.

    Returns:
        The forms of the nodes, each once, in the order of their functions' names.
    """
    forms = set()
    for node in list(graph):
        if not is_op(node, "Experts", DOMAIN):
            continue
        form = experts_form_of(node)
        inputs = [value for value in node.inputs if value is not None]
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


def experts_form_of(node: ir.Node) -> ExpertsForm:
    """Return the form of an Experts node: what its experts compute between their two matrix products."""
    return ExpertsForm(**{name: node.attributes[name].value for name in vars(ExpertsForm())})
