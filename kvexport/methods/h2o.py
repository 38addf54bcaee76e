"""H2O, the heavy-hitter oracle (arXiv 2306.14048): slots with the largest sum of attention probabilities are kept."""

from __future__ import annotations

from typing import ClassVar

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class H2O(Method):
    """Heavy hitters and a recent window; evicted slots are dropped."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "the largest accumulated attention is kept; the rest is dropped"
    source: ClassVar[str] = "arXiv 2306.14048"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The undecayed sum of probabilities, mean over a query-head group."""
        return (Statistic("probability"),)

    def policy(self) -> MergePolicy:
        """By that sum; evicted slots are dropped."""
        return MergePolicy(select="score")
