"""A proof from the nodes of an ONNX graph that past and present cache state may share their buffers.

ONNX Runtime's planner does not know that the buffer of an input `past.x` is also that of the output `present.x`.
Writing `present.x` over `past.x` is safe under two conditions. Every other node that reads `past.x`, or a view of it,
must run before the node that writes. And the node that writes must read each element before it overwrites the element:
it writes single rows, or element by element.
"""

from collections import defaultdict

import onnx
from onnx import inliner

from kvexport.errors import KvexportError

# Operators that read element i before they write element i, or that write only the given rows
SAFE_WRITERS = {"ScatterND", "ScatterElements", "Where", "Identity", "Add"}
# Operators whose output may be the buffer of their input, so that a reader of the output reads the input
VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}


def check_in_place(model: onnx.ModelProto) -> None:
    """Raise KvexportError if a node of a graph may read a cache state tensor after it was overwritten in place."""
    graph = inliner.inline_local_functions(model).graph
    nodes = list(graph.node)
    producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    readers = defaultdict(list)
    for i, node in enumerate(nodes):
        for name in set(node.input):
            readers[name].append(i)
    ancestors: list[int] = []  # bit j of ancestors[i]: node j runs before node i
    for i, node in enumerate(nodes):
        bits = 0
        for name in node.input:
            if name in producer:
                j = producer[name]
                if j >= i:
                    raise KvexportError(
                        f"the graph's nodes are not in order: {node.name} reads {name} before it is made"
                    )
                bits |= ancestors[j] | (1 << j)
        ancestors.append(bits)
    outputs = {output.name for output in graph.output}
    for value in graph.input:
        present = value.name.replace("past_key_values.", "present.").replace("past_length", "present_length")
        if present == value.name or present not in outputs:
            continue
        if present not in producer:
            raise KvexportError(f"{present} is not computed by any node")
        writer = producer[present]
        names = {value.name}
        pending = [value.name]
        while pending:
            name = pending.pop()
            for i in readers[name]:
                if i != writer and nodes[i].op_type in VIEWS and nodes[i].input[0] == name:
                    pending += set(nodes[i].output) - names
                    names.update(nodes[i].output)
        if nodes[writer].op_type == "Identity" and nodes[writer].input[0] in names:
            continue  # the tensor is only passed through, and written over itself
        for i in sorted({i for name in names for i in readers[name]}):
            node = nodes[i]
            if node.op_type == "Shape":  # a shape does not change
                continue
            written = set(node.input[1:]) if node.op_type.startswith("Scatter") else set()
            writes_safely = node.op_type in SAFE_WRITERS and names.isdisjoint(written)
            if not (writes_safely if i == writer else ancestors[writer] >> i & 1):
                raise KvexportError(
                    f"{node.op_type} {node.name} may read {value.name} after {present} was written over it"
                )
