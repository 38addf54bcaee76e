"""KeepKV (arXiv 2504.09936): what leaves merges into its nearest neighbour without changing the current attention output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvexport.methods.base import Leaving, Method, Slots, Statistic, corrected_log_ema, gather_rows

if TYPE_CHECKING:
    from torch import Tensor

NOWHERE = -2.0  # below every cosine


class KeepKV(Method):
    """Electoral votes and zero-perturbation merging.

    decay: ``a`` of the moving average of exp(logit) (the paper leaves it open). window: queries of one call that count, 0 = all.
    threshold: a leaving slot merges into the most similar target iff their keys' cosine is above it, and is dropped otherwise.
    zip: what absorbs the merge's error for the current query. ``key`` scales the merged key (the paper's Eq. 7), ``vote`` keeps the
        weighted mean and stores fractional votes, ``mean`` does neither (the authors' code; not lossless).
    key_factor_max: a key factor outside [1/x, x] falls back to ``vote`` for that slot (Eq. 7 has a pole and a sign flip).
    order: ``evict-first`` picks the lowest scores and merges what it can of them; ``merge-first`` lets slots leave that have a
        neighbour of higher score above the threshold, lowest score first, and only then the lowest scores of the rest.
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
    recency_weight: float = Field(1.0, ge=1.0)

    @property
    def vote_exponent(self) -> float:
        """Votes count in full: a slot of p votes attends like p equal keys."""
        return 1.0

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """ln of the moving average of exp(raw logit)."""
        return (Statistic("log_ema", self.decay, self.window, self.recency_weight),)

    def priority(self, slots: Slots, target: Tensor) -> Tensor:
        """The bias-corrected score, in the order that `order` asks for."""
        import torch

        score = corrected_log_ema(slots, 0, self.decay)
        if self.order == "evict-first":
            return score
        unit = _unit(slots.key)
        allowed = target[:, :, None, :] & (score[:, :, None, :] > score[:, :, :, None])
        similarity = torch.where(allowed, unit @ unit.transpose(-1, -2), NOWHERE)
        mergeable = similarity.amax(-1) > self.threshold
        ascending = torch.where(target, score, torch.inf).sort(dim=-1, stable=True).indices
        ranks = torch.arange(score.shape[-1], device=score.device).expand_as(ascending)
        rank = torch.zeros_like(ascending).scatter(-1, ascending, ranks).float()
        return torch.where(mergeable, rank - score.shape[-1], rank)

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """Joint merge per target (methods.md, KeepKV): ``w = p s``, ``k = sum w k / sum w``, likewise v, and the mode `zip`."""
        import torch

        slot_key = gather_rows(slots.key, leaving.slot).float()
        slot_value = gather_rows(slots.value, leaving.slot).float()
        similarity = _unit(slot_key) @ _unit(slots.key).transpose(-1, -2)  # [B, H, V, C]
        similarity = torch.where(leaving.target[:, :, None, :], similarity, NOWHERE)
        best, to = similarity.max(dim=-1)  # [B, H, V]; the first of equals, which has the lowest position
        merges = leaving.live & (best > self.threshold)

        def joined(own: Tensor, arriving: Tensor) -> Tensor:
            index = to if own.dim() == 3 else to[..., None].expand(*to.shape, own.shape[-1])
            return own.scatter_add(2, index, arriving)

        logit = corrected_log_ema(slots, len(self.statistics) - 1, self.decay)
        logit_v = logit.gather(2, leaving.slot)
        votes_v = torch.where(merges, slots.votes.gather(2, leaving.slot), 0.0)
        top = logit.scatter_reduce(2, to, torch.where(merges, logit_v, -torch.inf), "amax")
        weight = slots.votes * torch.exp(logit - top)
        weight_v = votes_v * torch.exp(torch.where(merges, logit_v - top.gather(2, to), 0.0))
        received = joined(torch.zeros_like(weight), merges.float()) > 0
        total = torch.where(received, joined(weight, weight_v), 1.0)  # sum w, relative to exp(top)
        votes = joined(slots.votes, votes_v)
        key = joined(weight[..., None] * slots.key.float(), weight_v[..., None] * slot_key) / total[..., None]
        value = joined(weight[..., None] * slots.value.float(), weight_v[..., None] * slot_value) / total[..., None]

        if self.zip != "mean":
            log_total = torch.log(total) + top
            mean_logit = joined(weight * logit, weight_v * logit_v) / total
            fractional = torch.exp(log_total - mean_logit)
            if self.zip == "vote":
                votes = fractional
            else:
                factor = _key_factor(log_total - torch.log(torch.clamp(votes, min=1e-30)), mean_logit)
                usable = (factor >= 1.0 / self.key_factor_max) & (factor <= self.key_factor_max)
                key = torch.where(usable[..., None], factor[..., None] * key, key)
                votes = torch.where(usable, votes, fractional)
        return replace(
            slots,
            key=torch.where(received[..., None], key.to(slots.key.dtype), slots.key),
            value=torch.where(received[..., None], value.to(slots.value.dtype), slots.value),
            votes=torch.where(received, votes, slots.votes),
            score=self._merged_score(slots, leaving.slot, to, merges, received),
            position=slots.position.scatter_reduce(2, to, torch.where(merges, slots.position.gather(2, leaving.slot), 0), "amax"),
        )

    def _merged_score(self, slots: Slots, leaving: Tensor, to: Tensor, merges: Tensor, received: Tensor) -> Tensor:
        """``S = sum p S / sum p``, in the logarithm; [B, H, K, C]."""
        import torch

        score = slots.score[:, :, -1]
        score_v = score.gather(2, leaving)
        top = score.scatter_reduce(2, to, torch.where(merges, score_v, -torch.inf), "amax")
        votes_v = torch.where(merges, slots.votes.gather(2, leaving), 0.0)
        share_v = votes_v * torch.exp(torch.where(merges, score_v - top.gather(2, to), 0.0))
        share = (slots.votes * torch.exp(score - top)).scatter_add(2, to, share_v)
        count = slots.votes.scatter_add(2, to, votes_v)
        merged = top + torch.log(torch.where(received, share / torch.where(received, count, 1.0), 1.0))
        return torch.where(received, merged, score)[:, :, None]


def _unit(key: Tensor) -> Tensor:
    """Keys over their norm, in float32; a zero key stays zero."""
    import torch

    key = key.float()
    return key / torch.clamp(key.norm(dim=-1, keepdim=True), min=1e-12)


def _key_factor(log_mean: Tensor, mean_logit: Tensor) -> Tensor:
    """``ln m / L`` of Eq. 7; 1 where both agree (L may be 0 there), infinite at the pole."""
    import torch

    ratio = log_mean / torch.where(mean_logit == 0.0, 1.0, mean_logit)
    ratio = torch.where(mean_logit == 0.0, torch.inf, ratio)
    return torch.where(log_mean == mean_logit, 1.0, ratio)
