"""H2O, the heavy-hitter oracle (arXiv 2306.14048): slots with the largest sum of probabilities are kept."""

from __future__ import annotations

from typing import ClassVar

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class H2O(Method):
    """H2O: heavy hitters and a recent window are kept, and evicted slots are dropped."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "the largest accumulated attention is kept; the rest is dropped"
    source: ClassVar[str] = "arXiv 2306.14048"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sum of probabilities without decay, averaged over the query heads of a group."""
        return (Statistic("probability"),)

    def policy(self) -> MergePolicy:
        """Return the policy: the lowest sum is evicted first, and evicted slots are dropped."""
        return MergePolicy(select="score")
