"""Readable names for the values of ONNX graphs, which viewers of ONNX files show."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

_SHOWN = 4  # numbers of a constant in its name


def unique_names(used: Iterable[str]) -> Callable[[str], str]:
    counts = dict.fromkeys(used, 1)

    def unique(name: str) -> str:
        candidate = name
        while candidate in counts:
            counts[name] += 1
            candidate = f"{name}.{counts[name]}"
        counts[candidate] = 1
        return candidate

    return unique


def name_constants(constants: Iterable[ir.Value], unique: Callable[[str], str]) -> None:
    named = list(constants)
    for i, value in enumerate(named):  # no new name may be the old name of another constant
        value.name = f"constant number {i}"
    for value in named:
        assert value.const_value is not None and value.dtype is not None
        numbers = value.const_value.numpy()
        shown = "_".join(f"{x:g}" for x in numbers.ravel().tolist()) if numbers.size <= _SHOWN else ""
        value.name = unique(f"{value.dtype.name.lower()}.{shown or 'x'.join(map(str, numbers.shape))}")


def name_by_operators(graph: ir.Graph) -> None:
    """Name nodes and values of a traced ONNX graph after their operators; inputs and outputs keep their names."""
    kept = {*graph.inputs, *graph.outputs}
    unique = unique_names(str(value.name) for value in kept)
    name_constants([value for value in graph.initializers.values() if value not in kept], unique)
    for node in ir.traversal.RecursiveGraphIterator(graph):
        inner = node.graph.outputs if node.graph is not graph and node.graph is not None else ()
        for value in node.outputs:
            if value not in kept and value not in inner:
                value.name = unique(node.op_type)
        node.name = unique(node.op_type) if node.outputs[0] in kept else node.outputs[0].name
