"""SnapKV (arXiv 2404.14469): slots that the last queries of the prompt attend to are kept, and their
neighbours."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class SnapKV(Method):
    """The attention of an observation window, pooled over neighbouring positions; evicted slots are dropped.

    window: the last so many queries of a call observe (the paper's window closes the prompt; of a decoding step the one
        query does).
    pool: positions pooled around each token, an odd number; those that are protected or gone count as zero.
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
            raise ValueError(f"an odd number of positions is pooled around each token, this is {pool}")
        return pool

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sum of probabilities over the observation window, mean over a query-head group; it orders as its mean
        does."""
        return (Statistic("probability", 1.0, self.window),)

    def policy(self) -> MergePolicy:
        """By that sum over neighbouring unprotected slots; evicted slots are dropped."""
        return MergePolicy(select="pooled", pooled=self.pool)
