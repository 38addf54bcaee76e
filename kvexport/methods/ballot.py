"""Ballot, this project's own: votes add up, to a bound. Slots that another one stands for are evicted first,
and merge into the key nearest to their own."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class Ballot(Merging):
    """KeepKV's merge without its gate: what a threshold rejects loses its mass, and cosine bounds nothing where norms
    differ, while ``|q (k_e - k_c)| <= |q| |k_e - k_c|`` bounds the change of a logit. Past attention alone does not say
    which slots are superfluous (one that nothing has asked for yet has none); how well another slot stands for it does.

    order: ``least-error`` evicts those slots whose merge costs least, by ``w^attention |k_e - k_c|^2 |v_e -
        v_c|^2`` with w the slot's mean probability and c the slot of higher importance for which that is smallest;
        ``least-attended`` the lowest w.
    attention: how much past attention counts in that. pool: such slots are looked for among the lowest w, `pool` times
        as many as have to be evicted.
    zip: ``count`` adds votes up, ``vote`` stores fractional votes; both keep the mean key. The fractional ones are
        exact for the query that the averages stand for and, being the tangent of a convex function, too few for every
        other, merge after merge.
    votes_max: as many tokens a merged slot counts for at most. Over hundreds of budgets one that stands for tokens from
        everywhere says nothing any more; without a bound it would still draw their attention.
    decay: ``a`` of the average that weighs.
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
        """They do."""
        return True

    @property
    def vote_exponent(self) -> float:
        """Votes count in full."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The sum of probabilities, which selects, and ln of the moving average of exp(raw logit), which weighs."""
        return (Statistic("probability"), Statistic("log_ema", self.decay))

    def policy(self) -> MergePolicy:
        """The mean probability per observation selects; a zip of every evicted slot into the nearest key."""
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
