"""Ballot, this project's own: votes add up, to a bound. What is said twice leaves first, and merges into the key
nearest to its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvexport.methods.base import Leaving, Slots, Statistic, corrected_log_ema, gather_rows
from kvexport.methods.joint import candidates, group, nearest, squared_distances, zipped
from kvexport.methods.merging import Merging

if TYPE_CHECKING:
    from torch import Tensor

LAST = 1e30  # above every error


class Ballot(Merging):
    """KeepKV's merge without its gate: what a threshold rejects loses its mass, and cosine bounds nothing where norms
    differ, while ``|q (k_e - k_c)| <= |q| |k_e - k_c|`` bounds the change of a logit. Past attention alone does not say
    what may leave (what has not been asked yet has none); how well another slot stands for it does.

    order: ``least-error`` lets those slots leave whose merge costs least, by ``w^attention |k_e - k_c|^2 |v_e -
        v_c|^2`` with w the slot's mean probability and c the slot of higher importance for which that is smallest;
        ``least-attended`` the lowest w.
    attention: how much past attention counts in that. pool: such slots are looked for among the lowest w, `pool` times
        as many as have to leave.
    zip: ``count`` adds votes up, ``vote`` stores fractional votes; both keep the mean key. The fractional ones are
        exact for the query that
        the averages stand for and, being the tangent of a convex function, too few for every other, merge after merge.
    votes_max: as many tokens a merged slot counts for at most. Over hundreds of budgets one that stands for tokens from
        everywhere says
        nothing any more; without a bound it would still draw their attention.
    decay: ``a`` of the average that weighs.
    """

    name: ClassVar[str] = "ballot"
    summary: ClassVar[str] = "what another slot stands for best leaves, and merges into the nearest key; no threshold"
    source: ClassVar[str] = "this project"
    recent_receives: ClassVar[bool] = True

    order: Literal["least-error", "least-attended"] = "least-error"
    attention: float = Field(0.5, ge=0.0)
    pool: int = Field(4, ge=1)
    zip: Literal["vote", "count"] = "count"
    votes_max: float = Field(32.0, ge=1.0)
    decay: float = Field(0.95, gt=0.0, lt=1.0)

    @property
    def vote_exponent(self) -> float:
        """Votes count in full."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The sum of probabilities, which selects, and ln of the moving average of exp(raw logit), which weighs."""
        return (Statistic("probability"), Statistic("log_ema", self.decay))

    def own_importance(self, slots: Slots) -> Tensor:
        """The mean probability per observation, ``A / (now - position + 1)``."""
        import torch

        seen = torch.clamp(slots.now - slots.position + 1, min=1)
        return slots.score[:, :, 0] / seen.float()

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """The importance, or before all others the error of the merges that the pool offers."""
        import torch

        importance = self.importance(slots, target, count)
        if self.order == "least-attended":
            return importance
        pool = candidates(slots, importance, target, self.pool, count)
        own = gather_rows(importance, pool.slot)
        apart = squared_distances(slots.key, pool.slot) * squared_distances(slots.value, pool.slot)
        higher = target[:, :, None, :] & (importance[:, :, None, :] > own[..., None])
        apart = torch.where(higher, apart, LAST).amin(-1)
        error = torch.clamp(own, min=0.0) ** self.attention * apart
        rank = LAST * (1.0 + pool.rank.float())
        joins = pool.live & (apart < LAST)
        return rank.scatter(
            -1, pool.slot, torch.where(joins, error.clamp(max=0.1 * LAST), gather_rows(rank, pool.slot))
        )

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """Joint merge into the nearest key (`joint.zipped`), recent ones included, sinks not."""
        import torch

        to, _ = nearest(slots, leaving, "distance")
        groups = group(leaving, to, leaving.live & leaving.target.any(-1, keepdim=True))
        mode = "vote" if self.zip == "vote" else "mean"
        key, value, votes = zipped(slots, groups, corrected_log_ema(slots, -1, self.decay), mode)
        score = groups.scores(slots, self.statistics)
        if self.selector == "own":
            # Means per observation add; as a sum over the merged slot's own observations, which began with its latest
            # token.
            own, arriving = groups.pair(self.own_importance(slots))
            mean = groups.total(own, arriving)
            score = torch.stack([mean * (slots.now - groups.latest(slots) + 1).float(), score[..., -1]], dim=-1)
        return groups.write(slots, key, value, votes.clamp(max=self.votes_max), score)
