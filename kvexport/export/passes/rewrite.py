"""The interface of a pass over an ONNX graph, the log of how often each pass applied, and two simple passes."""

import functools
import logging
from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

logger = logging.getLogger("kvexport.export.passes")

Pass = Callable[[ir.Model], int]
"""A function that rewrites the graph of a model, and returns at how many nodes it did."""


def at_every_node(rewrite: Callable[[ir.Node], bool]) -> Pass:
    """Make a pass of a function that rewrites the nodes that end at a node; it returns whether it did."""

    @functools.wraps(rewrite)
    def visit(model: ir.Model) -> int:
        return sum(node.graph is not None and rewrite(node) for node in list(model.graph))

    return visit


def run_passes(model: ir.Model, passes: Sequence[Pass]) -> dict[str, int]:
    applied: dict[str, int] = {}
    for run in passes:
        applied[run.__name__] = run(model)
        logger.debug("%s: applied %d times", run.__name__, applied[run.__name__])
    return applied


def remove_unused(model: ir.Model) -> int:
    """Remove the nodes, initializers and functions that no node of a graph reads."""
    before = len(model.graph)
    RemoveUnusedNodesPass()(model)
    return before - len(model.graph)


def sort_nodes(model: ir.Model) -> int:
    """Sort the nodes of a graph so that each node comes after the nodes that compute its inputs."""
    before = list(model.graph)
    model.graph.sort()
    return sum(one is not other for one, other in zip(before, model.graph, strict=True))
