"""D2O (arXiv 2406.13035): an evicted slot merges into the most similar key if it is more similar than other
evicted ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from kvexport.methods.merging import Merging
from kvexport.methods.primitives.sets import NO_TARGET, merge_sets, nearest
from kvexport.methods.slots import Evicted, Slots

if TYPE_CHECKING:
    from torch import Tensor


class D2O(Merging):
    """Heavy hitters are kept (the paper: 4 sinks); an evicted slot merges where its best cosine u reaches the mean of
    this call's, and is dropped otherwise. The paper's threshold is an average over calls, which no state carries
    here."""

    name: ClassVar[str] = "d2o"
    summary: ClassVar[str] = "merges into the most similar key above the call's mean similarity"
    source: ClassVar[str] = "arXiv 2406.13035"

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Convex weights: ``e`` for the target and ``e^u`` for the evicted slot, over their sum; of keys and values."""
        import torch

        to, cosine = nearest(slots, evicted, "cosine")
        has_target = evicted.occupied & (cosine > NO_TARGET)
        number = torch.clamp(has_target.sum(-1, keepdim=True), min=1)
        threshold = torch.where(has_target, cosine, 0.0).sum(-1, keepdim=True) / number
        sets = merge_sets(evicted, to, has_target & (cosine >= threshold))
        weight_v = torch.exp(torch.clamp(cosine, min=-1.0))
        weight = torch.full_like(weight_v, math.e)
        key, value = (sets.mean(x, weight, weight_v) for x in (slots.key, slots.value))
        votes: Tensor = sets.sum(*sets.pair(slots.votes))
        return sets.write(slots, key, value, votes, sets.scores(slots, self.statistics))
