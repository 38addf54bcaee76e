"""The interface of a pass over an ONNX graph, the report of what a pass rewrote and refused, and two simple passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

logger = logging.getLogger("kvexport.export.passes")
Match = TypeVar("Match")


@dataclass
class PassReport:
    name: str
    applied: int = 0  # how often the pass rewrote nodes
    # (name of a node or of its first output, reason) for every place where the pattern matched but the check refused
    refused: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.name}: applied {self.applied} times, refused {len(self.refused)} times"]
        return "\n".join([*lines, *(f"  {node}: {reason}" for node, reason in self.refused)])


Pass = Callable[[ir.Model], PassReport]


@dataclass(frozen=True)
class Rewrite(Generic[Match]):
    """A pass that visits the nodes of a graph in order, and rewrites each match of a pattern that a check accepts."""

    name: str  # name of the pass
    # Returns the matches that end at a node; it compares only operators and the connections between nodes
    pattern: Callable[[ir.Node], Iterable[Match]]
    # Returns why a match must not be rewritten (shapes, types, other readers); "" if it may be
    check: Callable[[Match], str]
    rewrite: Callable[[Match], None]  # changes the graph; only a node's first match that may be rewritten is

    def __call__(self, model: ir.Model) -> PassReport:
        report = PassReport(self.name)
        for node in list(model.graph):
            if node.graph is not None:
                self._at(node, report)
        return report

    def _at(self, node: ir.Node, report: PassReport) -> None:
        refused = []
        for match in self.pattern(node):
            reason = self.check(match)
            if not reason:
                self.rewrite(match)
                report.applied += 1
                return
            refused.append((str(node.name or node.outputs[0].name), reason))
        report.refused += dict.fromkeys(refused)


def run_passes(model: ir.Model, passes: Sequence[Pass]) -> list[PassReport]:
    reports = []
    for run in passes:
        reports.append(run(model))
        logger.debug("%s", reports[-1])
    return reports


def remove_unused(model: ir.Model) -> PassReport:
    """Remove the nodes, initializers and functions that no node of a graph reads; report how many nodes went."""
    before = len(model.graph)
    RemoveUnusedNodesPass()(model)
    return PassReport("unused nodes", applied=before - len(model.graph))


def sort_nodes(model: ir.Model) -> PassReport:
    """Sort the nodes of a graph so that each node comes after the nodes that compute its inputs."""
    before = list(model.graph)
    model.graph.sort()
    return PassReport("order", applied=sum(one is not other for one, other in zip(before, model.graph, strict=True)))
