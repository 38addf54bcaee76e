"""Passes over a whole ONNX graph: nodes that nothing reads are removed, nodes stand after those they read."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from kvexport.export.passes.report import PassReport


def remove_unused(model: ir.Model) -> PassReport:
    """Removes nodes, initializers and functions that nothing reads; `applied` counts nodes."""
    before = len(model.graph)
    RemoveUnusedNodesPass()(model)
    return PassReport("unused nodes", applied=before - len(model.graph))


def sort_nodes(model: ir.Model) -> PassReport:
    """Puts every node after those whose outputs it reads: a Linear of several products stands where the last of them
    stood, which may be after what reads the first. `applied` counts nodes that moved."""
    before = list(model.graph)
    model.graph.sort()
    return PassReport("order", applied=sum(one is not other for one, other in zip(before, model.graph, strict=True)))
