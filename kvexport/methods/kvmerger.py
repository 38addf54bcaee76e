"""KVMerger (arXiv 2407.08454): each run of consecutive, similar tokens in the cache becomes one token.

The weights of the merge are a Gaussian around the pivot, the most attended token of the run.
"""

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
    """KVMerger: runs of neighbouring cache slots with similar keys merge into their most attended slot.

    Neighbouring slots, except sinks and recent ones, are joined if their keys are similar, highest cosine first. As
    many pairs are joined as slots have to be evicted. A run of joined slots merges into its pivot, the most attended
    slot of the run. If joining frees too few slots, the least attended of the other slots are dropped.

    Attributes:
        threshold: Neighbours are joined if the cosine of their keys is above this value.
        heavy: A share of the slots that may be evicted: this share, the most attended slots, is never joined.
        sigma: The standard deviation of the Gaussian that weights a merge, a distance between keys. 0 computes it for
            each set S of joined slots as ``sum |k_p - k_i| / (sqrt(2) |S|)``, where k_p is the pivot's key. The paper
            gives this formula, although a fixed 5 is best in its ablation.
        value_scale: ``mean`` stores the mean of a set's values. ``set_size`` multiplies the mean by the number of
            tokens in the set (its votes), as the paper's text says, so a set that grows over several merges is scaled
            only once. The attention output is then too large, because the softmax does not count merged tokens.
    """

    name: ClassVar[str] = "kvmerger"
    summary: ClassVar[str] = "runs of similar neighbours merge around their most attended token"
    source: ClassVar[str] = "arXiv 2407.08454"

    threshold: float = Field(0.75, ge=-1.0, le=1.0)
    heavy: float = Field(0.1, ge=0.0, lt=1.0)
    sigma: float = Field(0.0, ge=0.0)
    value_scale: Literal["mean", "set_size"] = "mean"

    @property
    def merges_values_as_keys(self) -> bool:
        """Whether a merged value is a mean with the keys' weights, not multiplied by the number of merged tokens."""
        return self.value_scale == "mean"

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return the keep score: lowest for slots that merge into a pivot, and higher for more attended slots."""
        import torch

        importance = self.importance(slots, unprotected)
        pivot = self._pivots(slots, unprotected, importance, count)
        place = torch.arange(unprotected.shape[-1], device=unprotected.device)
        others = ranks(torch.where(unprotected, importance, torch.inf)) + unprotected.shape[-1]
        return torch.where(pivot != place, place, others).float()

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Return the slots after each run of similar tokens has merged into its pivot, as Gaussian means.

        All weights are 1 if all keys of a run are equal, where the computed sigma is zero.
        """
        import torch

        count, unprotected = evicted.index.shape[-1], evicted.unprotected
        targets = self._pivots(slots, unprotected, self.importance(slots, unprotected), count).gather(-1, evicted.index)
        merges = evicted.occupied & (targets != evicted.index) & evicted.can_receive.gather(-1, targets)
        sets = merge_sets(evicted, targets, merges)
        pivot, other = sets.pair(slots.key)
        distance = (pivot - other).norm(dim=-1)
        ones = torch.ones_like(distance)
        size = sets.sum(ones, ones)
        set_sigma = sets.sum(torch.zeros_like(distance), distance) / (math.sqrt(2.0) * size)
        sigma = torch.full_like(set_sigma, self.sigma) if self.sigma else set_sigma
        gaussian = torch.where(sigma > 0, torch.exp(-0.5 * (distance / torch.where(sigma > 0, sigma, 1.0)) ** 2), 1.0)
        votes = sets.sum(*sets.pair(slots.votes))
        key = sets.mean(slots.key, ones, gaussian)
        if self.value_scale == "set_size":
            token_value = slots.value.float() / torch.where(slots.votes > 0, slots.votes, 1.0)[..., None]
            value = sets.mean(token_value, ones, gaussian) * votes[..., None]
        else:
            value = sets.mean(slots.value, ones, gaussian)
        return sets.write(slots, key, value, votes, sets.scores(slots, self.statistics))

    def _pivots(self, slots: Slots, unprotected: Tensor, importance: Tensor, count: int) -> Tensor:
        """Return the index of the pivot (most attended slot) of each slot's run of similar tokens; [B, H, C] int64.

        For a slot that is in no run, the result is the slot itself.
        """
        import torch

        capacity = unprotected.shape[-1]
        place = torch.arange(capacity, device=unprotected.device).expand_as(importance)
        rank = ranks(torch.where(unprotected, -importance, torch.inf))  # 0: the most attended
        light = unprotected & (rank >= (self.heavy * unprotected.sum(-1, keepdim=True)).floor())
        before = torch.clamp(torch.arange(capacity, device=unprotected.device) - 1, min=0)
        keys = unit(slots.key)
        cosine = (keys * gather_rows(keys, before.expand_as(rank))).sum(-1)
        similar = light & light.index_select(-1, before) & (place > 0) & (cosine > self.threshold)
        # Empty slots are evicted first. Each head joins only as many pairs as it needs itself, so that a sequence does
        # not depend on its neighbours in the batch.
        needed = count - (slots.votes == 0).sum(-1, keepdim=True)
        joins = similar & (ranks(torch.where(similar, -cosine, torch.inf)) < needed)
        # Place and count of joins both grow by one along a run, so their difference numbers the runs.
        run = place - joins.to(torch.int64).cumsum(-1)
        best = torch.full_like(rank, capacity).scatter_reduce(-1, run, rank, "amin")
        order = torch.zeros_like(rank).scatter(-1, rank, place)
        return order.gather(-1, best.gather(-1, run))
