"""PyramidInfer (arXiv 2405.12532): recent-weighted attention selects, and deeper layers keep less."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class PyramidInfer(Method):
    """The attention of a call's last queries, the newest weighing most; evicted slots are dropped.

    window: the last so many queries of a call count. recency_weight: of the newest against 1 for the oldest (the
        authors' 1.2).
    """

    name: ClassVar[str] = "pyramidinfer"
    summary: ClassVar[str] = "slots most attended by the latest queries, the newest weighing most, are kept"
    source: ClassVar[str] = "arXiv 2405.12532"
    allocation: ClassVar[Literal["uniform", "cosine", "pyramid"]] = "cosine"

    window: int = Field(64, ge=1)
    recency_weight: float = Field(1.2, ge=1.0)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The recent-weighted sum of probabilities, mean over a query-head group."""
        return (Statistic("probability", 1.0, self.window, self.recency_weight),)

    def policy(self) -> MergePolicy:
        """By that sum; evicted slots are dropped."""
        return MergePolicy(select="score")
