"""KeepKV (arXiv 2504.09936): what leaves merges into its nearest neighbour without changing the current attention output."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvexport.methods.base import Leaving, Method, Slots, Statistic, corrected_log_ema, gather_rows
from kvexport.methods.joint import Groups, group, nearest_by_cosine, unit

if TYPE_CHECKING:
    from torch import Tensor


class KeepKV(Method):
    """Electoral votes and zero-perturbation merging.

    decay: ``a`` of the moving average of exp(logit) (the paper leaves it open). window: queries of one call that count, 0 = all.
    threshold: a leaving slot merges into the most similar target iff their keys' cosine is above it, and is dropped otherwise.
    zip: what absorbs the merge's error for the current query. ``key`` scales the merged key (the paper's Eq. 7), ``vote`` keeps the
        weighted mean and stores fractional votes, ``mean`` does neither (the authors' code; not lossless).
    key_factor_max: a key factor outside [1/x, x] falls back to ``vote`` for that slot (Eq. 7 has a pole and a sign flip).
    order: ``evict-first`` picks the lowest scores and merges what it can of them; ``merge-first`` lets slots leave that have a
        neighbour of higher score above the threshold, lowest score first, and only then the lowest scores of the rest.
    pool: merge-first looks for such slots among the lowest scores, `pool` times as many as have to leave.
    recency_weight: weight of the newest query of the window against 1 for the oldest (the first version of the paper: 1.2).
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
    def statistics(self) -> tuple[Statistic, ...]:
        """ln of the moving average of exp(raw logit)."""
        return (Statistic("log_ema", self.decay, self.window, self.recency_weight),)

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """The bias-corrected score, in the order that `order` asks for."""
        import torch

        score = corrected_log_ema(slots, 0, self.decay)
        if self.order == "evict-first":
            return score
        ascending = torch.where(target, score, torch.inf).sort(dim=-1, stable=True).indices
        # The last row repeats where there are fewer slots than the pool asks for.
        places = torch.clamp(torch.arange(self.pool * count, device=score.device), max=score.shape[-1] - 1)
        pool = ascending.index_select(-1, places)
        keys = unit(slots.key)
        higher = target[:, :, None, :] & (score[:, :, None, :] > score.gather(-1, pool)[..., None])
        similarity = gather_rows(keys, pool) @ keys.transpose(-1, -2)
        # Empty slots leave first; a head's pool follows its own need, whatever its neighbours in the batch need.
        own = count - (slots.votes == 0).sum(-1, keepdim=True)
        joins = (torch.where(higher, similarity, -2.0).amax(-1) > self.threshold) & (places < self.pool * own)
        # Ranks, so that no score can outweigh what comes first: all that join, then the others, each by score.
        slots_in_all = score.shape[-1]
        by_score = torch.arange(slots_in_all, device=score.device).expand_as(ascending)
        rank = torch.zeros_like(ascending).scatter(-1, ascending, by_score)
        first = torch.zeros_like(ascending).scatter(-1, pool, torch.where(joins, slots_in_all, 0))
        return (rank - first).float()

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """Joint merge per target (methods.md, KeepKV): ``w = p s``, ``k = sum w k / sum w``, likewise v, and the mode `zip`."""
        import torch

        to, cosine = nearest_by_cosine(slots, leaving)
        groups = group(leaving, to, leaving.live & (cosine > self.threshold))
        votes, votes_v = groups.pair(slots.votes)
        logit, logit_v = groups.pair(corrected_log_ema(slots, -1, self.decay))
        top = groups.top(logit, logit_v)
        weight, weight_v = votes * torch.exp(logit - top), votes_v * torch.exp(torch.where(groups.merges, logit_v - top, -torch.inf))
        total = groups.total(weight, weight_v)  # sum w, relative to exp(top)
        count = groups.total(votes, votes_v)
        key, value = (
            groups.total(weight[..., None] * own, weight_v[..., None] * arriving) / total[..., None]
            for own, arriving in (groups.pair(slots.key), groups.pair(slots.value))
        )
        merged_votes = count
        if self.zip != "mean":
            log_total = torch.log(total) + top
            mean_logit = groups.total(weight * logit, weight_v * logit_v) / total
            fractional = torch.exp(log_total - mean_logit)
            if self.zip == "vote":
                merged_votes = fractional
            else:
                factor = _key_factor(log_total - torch.log(count), mean_logit)
                limit = min(self.key_factor_max, torch.finfo(torch.float32).max)  # the pole is outside every limit
                usable = (factor >= 1.0 / limit) & (factor <= limit)
                key = torch.where(usable[..., None], factor[..., None] * key, key)
                merged_votes = torch.where(usable, count, fractional)
        return groups.write(slots, key, value, merged_votes, self._merged_score(slots, groups))

    def _merged_score(self, slots: Slots, groups: Groups) -> Tensor:
        """``S = sum p S / sum p``, in the logarithm; [B, H, V, 1]."""
        import torch

        votes, votes_v = groups.pair(slots.votes)
        score, score_v = groups.pair(slots.score[:, :, -1])
        top = groups.top(score, score_v)
        share_v = votes_v * torch.exp(torch.where(groups.merges, score_v - top, -torch.inf))
        share = groups.total(votes * torch.exp(score - top), share_v) / groups.total(votes, votes_v)
        return (top + torch.log(share))[..., None]


def _key_factor(log_mean: Tensor, mean_logit: Tensor) -> Tensor:
    """``ln m / L`` of Eq. 7; 1 where both agree (L may be 0 there), infinite at the pole."""
    import torch

    ratio = log_mean / torch.where(mean_logit == 0.0, 1.0, mean_logit)
    ratio = torch.where(mean_logit == 0.0, torch.inf, ratio)
    return torch.where(log_mean == mean_logit, 1.0, ratio)
