"""KVMerger (arXiv 2407.08454): runs of consecutive, similar tokens become one, weighted by a Gaussian around their
pivot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.primitives.sets import merge_sets, unit
from kvexport.methods.slots import Evicted, Slots, gather_rows, ranks

if TYPE_CHECKING:
    from torch import Tensor


class KVMerger(Merging):
    """Neighbouring unprotected slots above the threshold are joined, highest cosine first, exactly as many pairs as are
    over budget; a run of joined slots merges into its pivot, the one most attended to. What joins cannot free is
    dropped, least attended first.

    threshold: neighbours join iff their keys' cosine is above it. heavy: the most attended share of the unprotected
        slots joins nothing.
    sigma: of the Gaussian, a distance; 0 takes the set's own, ``sum |k_p - k_i| / (sqrt(2) |S|)``, which contradicts
        the paper's ablation, where a fixed 5 is best.
    value_scale: ``mean``, or ``set_size``, the paper's text: values times |S|, which inflates the output, as no count
        enters the softmax.
        |S| counts tokens (the votes), so that a set that grows in several calls is scaled once.
    """

    name: ClassVar[str] = "kvmerger"
    summary: ClassVar[str] = "runs of similar neighbours merge around their most attended token"
    source: ClassVar[str] = "arXiv 2407.08454"

    threshold: float = Field(0.75, ge=-1.0, le=1.0)
    heavy: float = Field(0.1, ge=0.0, lt=1.0)
    sigma: float = Field(0.0, ge=0.0)
    value_scale: Literal["mean", "set_size"] = "mean"

    def keep_score(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """All of a run but its pivot first, then the others by importance."""
        import torch

        importance = self.importance(slots, target)
        pivot = self._pivots(slots, target, importance, count)
        place = torch.arange(target.shape[-1], device=target.device)
        alone = ranks(torch.where(target, importance, torch.inf)) + target.shape[-1]
        return torch.where(pivot != place, place, alone).float()

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """``g_i = exp(-|k_p - k_i|^2 / (2 sigma^2))``, keys and values by ``g / sum g``; one for equal keys, whose own
        sigma is zero."""
        import torch

        count, free = evicted.index.shape[-1], evicted.unprotected
        to = self._pivots(slots, free, self.importance(slots, free), count).gather(-1, evicted.index)
        sets = merge_sets(evicted, to, evicted.occupied & (to != evicted.index) & evicted.can_receive.gather(-1, to))
        pivot, other = sets.pair(slots.key)
        distance = (pivot - other).norm(dim=-1)
        ones = torch.ones_like(distance)
        size = sets.sum(ones, ones)
        own = sets.sum(torch.zeros_like(distance), distance) / (math.sqrt(2.0) * size)
        sigma = torch.full_like(own, self.sigma) if self.sigma else own
        gaussian = torch.where(sigma > 0, torch.exp(-0.5 * (distance / torch.where(sigma > 0, sigma, 1.0)) ** 2), 1.0)
        votes = sets.sum(*sets.pair(slots.votes))
        key = sets.mean(slots.key, ones, gaussian)
        if self.value_scale == "set_size":
            alone = slots.value.float() / torch.where(slots.votes > 0, slots.votes, 1.0)[..., None]
            value = sets.mean(alone, ones, gaussian) * votes[..., None]
        else:
            value = sets.mean(slots.value, ones, gaussian)
        return sets.write(slots, key, value, votes, sets.scores(slots, self.statistics))

    def _pivots(self, slots: Slots, free: Tensor, importance: Tensor, count: int) -> Tensor:
        """The slot that each slot's run merges into, itself where it joins nothing; [B, H, C] int64."""
        import torch

        capacity = free.shape[-1]
        place = torch.arange(capacity, device=free.device).expand_as(importance)
        rank = ranks(torch.where(free, -importance, torch.inf))  # 0: the most attended
        light = free & (rank >= (self.heavy * free.sum(-1, keepdim=True)).floor())
        before = torch.clamp(torch.arange(capacity, device=free.device) - 1, min=0)
        keys = unit(slots.key)
        cosine = (keys * gather_rows(keys, before.expand_as(rank))).sum(-1)
        similar = light & light.index_select(-1, before) & (place > 0) & (cosine > self.threshold)
        # Empty slots are evicted first; a head joins by its own need, whatever its neighbours in the batch need.
        own = count - (slots.votes == 0).sum(-1, keepdim=True)
        joins = similar & (ranks(torch.where(similar, -cosine, torch.inf)) < own)
        run = place - joins.to(torch.int64).cumsum(-1)  # one number for a whole run: both grow by one along it
        best = torch.full_like(rank, capacity).scatter_reduce(-1, run, rank, "amin")
        order = torch.zeros_like(rank).scatter(-1, rank, place)
        return order.gather(-1, best.gather(-1, run))
