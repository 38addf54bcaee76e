"""H2O, the heavy-hitter oracle (arXiv 2306.14048): the slots with the largest sum of attention probabilities stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvexport.methods.base import Method, Slots, Statistic

if TYPE_CHECKING:
    from torch import Tensor


class H2O(Method):
    """Heavy hitters and a recent window; what leaves is dropped."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "largest accumulated attention stays; the rest is dropped"
    source: ClassVar[str] = "arXiv 2306.14048"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The undecayed sum of probabilities, mean over a query-head group."""
        return (Statistic("probability"),)

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """The accumulated probability."""
        return slots.score[:, :, 0]
