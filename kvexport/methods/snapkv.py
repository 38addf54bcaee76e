"""SnapKV (arXiv 2404.14469): the cache slots that the last queries of the prompt attend to are kept."""

from typing import ClassVar

from pydantic import Field, field_validator

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class SnapKV(Method):
    """SnapKV: the attention of the last queries, summed over neighbouring positions, ranks slots.

    Evicted slots are dropped.

    Attributes:
        window: The number of last queries of a model call whose attention counts. The SnapKV paper takes the end of the
            prompt. A decode step has one query, which counts.
        pool: The number of positions that are pooled, an odd number: a slot's attention is summed over so many
            neighbouring positions, with the slot's own in the middle. Protected and evicted positions count as zero.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "slots most attended by the prompt's last queries, pooled over neighbours, are kept"
    source: ClassVar[str] = "arXiv 2404.14469"

    window: int = Field(64, ge=1)
    pool: int = Field(5, ge=1)

    @field_validator("pool")
    @classmethod
    def _odd(cls, pool: int) -> int:
        if pool % 2 == 0:
            raise ValueError(f"pool is {pool}, which has to be odd: each token is pooled with its neighbours")
        return pool

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The one statistic of a slot: the sum of the attention probabilities that a call's last queries give it."""
        return (Statistic("probability", 1.0, self.window),)

    def policy(self) -> MergePolicy:
        """Return the rule that drops the slots of lowest attention, each summed over its neighbouring positions."""
        return MergePolicy(select="pooled", pooled=self.pool)
