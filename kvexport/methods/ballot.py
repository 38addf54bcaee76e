"""Ballot, this project's own method: evict the cache slots that another slot can replace best.

An evicted slot merges into the slot with the nearest key. Votes add up, to a bound.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class Ballot(Merging):
    """KeepKV's merge without its similarity threshold, and with an eviction order by the error of the merge.

    With a similarity threshold, the attention mass of every rejected slot is lost. The cosine gives no bound if norms
    differ, while ``|q (k_e - k_c)| <= |q| |k_e - k_c|`` bounds the change of a logit. Past attention alone does not
    show which slots are superfluous, because a slot that no query has needed yet has received none. The error of
    merging the slot into another one does show it.

    Attributes:
        order: ``least-error`` first evicts the slots whose merge costs least. The cost is ``w^attention |k_e - k_c|^2
            |v_e - v_c|^2``, where w is the slot's mean probability and c is the slot of higher importance that gives
            the smallest cost. ``least-attended`` first evicts the slots of lowest w.
        attention: The exponent of w in that cost.
        pool: The cost is computed for the slots of lowest w only, `pool` times as many as have to be evicted.
        zip: ``count`` adds votes up. ``vote`` stores fractional votes. Both store the weighted mean of the keys.
            Fractional votes are exact for the query that the averages describe. For every other query they are too few,
            and the error grows with every merge.
        votes_max: The largest number of votes of a merged slot. After hundreds of merges a slot is a mean of unrelated
            tokens and carries no information. Without a bound it would still get the attention of all these tokens.
        decay: The factor ``a`` of the moving average that weights a merge.
    """

    name: ClassVar[str] = "ballot"
    summary: ClassVar[str] = "slots that another one stands for best are evicted into the nearest key; no threshold"
    source: ClassVar[str] = "this project"

    order: Literal["least-error", "least-attended"] = "least-error"
    attention: float = Field(0.5, ge=0.0)
    pool: int = Field(4, ge=1)
    zip: Literal["vote", "count"] = "count"
    votes_max: float = Field(32.0, ge=1.0)
    decay: float = Field(0.95, gt=0.0, lt=1.0)

    @property
    def recent_receives(self) -> bool:
        """Whether evicted slots may merge into slots of the recent window: always true for the method `ballot`."""
        return True

    @property
    def vote_exponent(self) -> float:
        """The factor alpha of the attention bias ``alpha * ln(votes)``: 1, so votes count in full."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The two statistics of each slot: the sum of probabilities, and ln of the moving average of exp(raw logit).

        The sum ranks slots for eviction, and the average gives the weights of merges.
        """
        return (Statistic("probability"), Statistic("log_ema", self.decay))

    def policy(self) -> MergePolicy:
        """Return the method's rule as data for the native kernels.

        The slot of the lowest mean attention probability is evicted first, and merges into the slot of the nearest key.
        """
        return self.selected(
            MergePolicy(
                select="mean",
                order="least_error" if self.order == "least-error" else "lowest",
                eviction_pool=self.pool,
                error_exponent=self.attention,
                merge="zip",
                measure="distance",
                weigh_decay=self.decay,
                zip="vote" if self.zip == "vote" else "mean",
                votes_max=self.votes_max,
                mean_adds=True,
            )
        )
