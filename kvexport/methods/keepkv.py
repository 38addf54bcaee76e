"""KeepKV (arXiv 2504.09936): what leaves merges into its nearest neighbour without changing the current attention
output."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvexport.methods.base import Leaving, Slots, Statistic, corrected_log_ema, gather_rows
from kvexport.methods.joint import candidates, group, nearest, unit, zipped
from kvexport.methods.merging import Merging

if TYPE_CHECKING:
    from torch import Tensor


class KeepKV(Merging):
    """Electoral votes and zero-perturbation merging.

    decay: ``a`` of the moving average of exp(logit) (the paper leaves it open). window: queries of one call that count,
        0 = all.
    threshold: a leaving slot merges into the most similar target iff their keys' cosine is above it, and is dropped
        otherwise.
    zip: what absorbs the merge's error for the current query. ``key`` scales the merged key (the paper's Eq. 7),
        ``vote`` keeps the weighted mean and stores fractional votes, ``mean`` does neither (the authors' code; not
        lossless).
    key_factor_max: a key factor outside [1/x, x] falls back to ``vote`` for that slot (Eq. 7 has a pole and a sign
        flip).
    order: ``evict-first`` picks the lowest scores and merges what it can of them; ``merge-first`` lets slots leave that
        have a neighbour of higher score above the threshold, lowest score first, and only then the lowest scores of the
        rest.
    pool: merge-first looks for such slots among the lowest scores, `pool` times as many as have to leave.
    recency_weight: weight of the newest query of the window against 1 for the oldest (the first version of the paper:
        1.2). The paper uses it to order slots of one window, where the sum of the weights does not matter; here it
        weighs a mean, so that scores stay
        logits, which `zip: key` needs.
    """

    name: ClassVar[str] = "keepkv"
    summary: ClassVar[str] = "votes and zero-perturbation merging into the most similar key"
    source: ClassVar[str] = "arXiv 2504.09936"

    decay: float = Field(0.9, gt=0.0, lt=1.0)
    window: int = Field(0, ge=0)
    threshold: float = Field(0.8, ge=-1.0, le=1.0)
    zip: Literal["key", "vote", "mean"] = "vote"
    key_factor_max: float = Field(2.0, ge=1.0)
    order: Literal["evict-first", "merge-first"] = "merge-first"
    pool: int = Field(4, ge=1)
    recency_weight: float = Field(1.0, ge=1.0)

    @property
    def vote_exponent(self) -> float:
        """Votes count in full: a slot of p votes attends like p equal keys."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """ln of the moving average of exp(raw logit)."""
        return (Statistic("log_ema", self.decay, self.window, self.recency_weight),)

    def own_importance(self, slots: Slots) -> Tensor:
        """The bias-corrected score."""
        return corrected_log_ema(slots, 0, self.decay)

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """The importance, in the order that `order` asks for."""
        import torch

        score = self.importance(slots, target, count)
        if self.order == "evict-first":
            return score
        pool = candidates(slots, score, target, self.pool, count)
        keys = unit(slots.key)
        higher = target[:, :, None, :] & (score[:, :, None, :] > gather_rows(score, pool.slot)[..., None])
        similarity = gather_rows(keys, pool.slot) @ keys.transpose(-1, -2)
        joins = (torch.where(higher, similarity, -2.0).amax(-1) > self.threshold) & pool.live
        # Ranks, so that no score can outweigh what comes first: all that join, then the others, each by score.
        first = torch.zeros_like(pool.rank).scatter(-1, pool.slot, torch.where(joins, score.shape[-1], 0))
        return (pool.rank - first).float()

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """Joint merge per target (`joint.zipped`) by the bias-corrected score."""
        to, cosine = nearest(slots, leaving, "cosine")
        groups = group(leaving, to, leaving.live & (cosine > self.threshold))
        key, value, votes = zipped(
            slots, groups, corrected_log_ema(slots, -1, self.decay), self.zip, self.key_factor_max
        )
        return groups.write(slots, key, value, votes, groups.scores(slots, self.statistics))
