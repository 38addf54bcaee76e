"""H2O, the heavy-hitter oracle (arXiv 2306.14048): the cache slots that have received the most attention are kept."""

from typing import ClassVar

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class H2O(Method):
    """H2O: the slots with the most attention (heavy hitters) and a recent window are kept, all others dropped."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "the largest accumulated attention is kept; the rest is dropped"
    source: ClassVar[str] = "arXiv 2306.14048"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The one statistic of a slot: the sum of its attention probabilities, averaged over query heads."""
        return (Statistic("probability"),)

    def policy(self) -> MergePolicy:
        """Return the rule that first drops the slot with the smallest sum of attention probabilities."""
        return MergePolicy(select="score")
