"""PyramidInfer (arXiv 2405.12532): recent-weighted attention ranks cache slots, and deeper layers keep fewer."""

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class PyramidInfer(Method):
    """PyramidInfer: slots are ranked by the attention of the last queries; evicted slots are dropped.

    Attributes:
        window: The number of last queries of a model call whose attention counts.
        recency_weight: The weight of the newest query, relative to 1 for the oldest. The authors use 1.2.
    """

    name: ClassVar[str] = "pyramidinfer"
    summary: ClassVar[str] = "slots most attended by the latest queries, the newest weighing most, are kept"
    source: ClassVar[str] = "arXiv 2405.12532"
    allocation: ClassVar[Literal["uniform", "cosine", "pyramid"]] = "cosine"

    window: int = Field(64, ge=1)
    recency_weight: float = Field(1.2, ge=1.0)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The one statistic of a slot: a sum of attention probabilities in which newer queries weigh more."""
        return (Statistic("probability", 1.0, self.window, self.recency_weight),)

    def policy(self) -> MergePolicy:
        """Return the rule that first drops the slot with the smallest weighted sum of attention probabilities."""
        return MergePolicy(select="score")
