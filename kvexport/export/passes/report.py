"""The interface of a pass over an ONNX graph, and the report of what the pass rewrote and refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import onnx_ir as ir

logger = logging.getLogger("kvexport.export.passes")
Match = TypeVar("Match")


@dataclass
class PassReport:
    name: str
    applied: int = 0  # how often the pass rewrote nodes
    # (name of the node or of its first output, reason) of every place where the pattern matched and the check refused
    refused: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.name}: applied {self.applied} times, refused {len(self.refused)} times"]
        return "\n".join([*lines, *(f"  {node}: {reason}" for node, reason in self.refused)])


Pass = Callable[[ir.Model], PassReport]


@dataclass(frozen=True)
class Rewrite(Generic[Match]):
    """A pass over the nodes of an ONNX graph, one by one in order, that rewrites each match of a pattern.

    Nodes that the pass removed are left out.
    """

    name: str  # name of the pass
    # Returns the matches that end at a node. It compares only operators and the connections between nodes.
    pattern: Callable[[ir.Node], Iterable[Match]]
    # Returns why a match must stay (shapes, types, other readers); empty if it may be rewritten
    check: Callable[[Match], str]
    rewrite: Callable[[Match], None]  # changes the graph. The first match of a node without a reason is rewritten.

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
