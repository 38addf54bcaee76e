"""D2O (arXiv 2406.13035): an evicted cache slot merges into the slot of the most similar key, if similar enough."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from kvexport.methods.merging import Merging
from kvexport.methods.primitives.sets import NO_TARGET, merge_sets, nearest
from kvexport.methods.slots import Evicted, Slots

if TYPE_CHECKING:
    from torch import Tensor


class D2O(Merging):
    """D2O: heavy hitters are kept, and evicted slots merge if their similarity to a kept slot reaches the mean.

    An evicted slot merges into the kept slot of the highest key cosine u if u is at least the mean of these cosines
    over the slots that the same merge evicts from the KV head. Otherwise the evicted slot is dropped. The D2O paper
    averages the threshold over merges as well, which would need state that kvexport's cache does not have. The paper
    keeps 4 sinks, the first tokens of a sequence.
    """

    name: ClassVar[str] = "d2o"
    summary: ClassVar[str] = "merges into the most similar key above the call's mean similarity"
    source: ClassVar[str] = "arXiv 2406.13035"

    @property
    def merges_values_as_keys(self) -> bool:
        """Whether a merge makes keys and values means with the same weights: true."""
        return True

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Return the slots after the merge: means that weight a kept slot with e and an evicted one with ``e^u``."""
        import torch

        targets, cosine = nearest(slots, evicted, "cosine")
        has_target = evicted.occupied & (cosine > NO_TARGET)
        number = torch.clamp(has_target.sum(-1, keepdim=True), min=1)
        threshold = torch.where(has_target, cosine, 0.0).sum(-1, keepdim=True) / number
        sets = merge_sets(evicted, targets, has_target & (cosine >= threshold))
        evicted_weight = torch.exp(torch.clamp(cosine, min=-1.0))
        target_weight = torch.full_like(evicted_weight, math.e)
        key, value = (sets.mean(x, target_weight, evicted_weight) for x in (slots.key, slots.value))
        votes: Tensor = sets.sum(*sets.pair(slots.votes))
        return sets.write(slots, key, value, votes, sets.scores(slots, self.statistics))
