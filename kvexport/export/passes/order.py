"""Two passes over a whole ONNX graph: one removes unused nodes, the other sorts nodes after the nodes they read."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from kvexport.export.passes.report import PassReport


def remove_unused(model: ir.Model) -> PassReport:
    """Remove the nodes, initializers and functions that no node of a graph reads; report how many nodes went."""
    before = len(model.graph)
    RemoveUnusedNodesPass()(model)
    return PassReport("unused nodes", applied=before - len(model.graph))


def sort_nodes(model: ir.Model) -> PassReport:
    """Sort the nodes of a graph so that each comes after the nodes whose outputs it reads; report how many moved.

    A Linear node fused from several is at the place of the last of them, so a reader of the first may come before it.
    """
    before = list(model.graph)
    model.graph.sort()
    return PassReport("order", applied=sum(one is not other for one, other in zip(before, model.graph, strict=True)))
