"""D2O (arXiv 2406.13035): what leaves merges into the most similar key if it is more similar than others that leave."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from kvexport.methods.base import Leaving, Slots
from kvexport.methods.joint import NO_TARGET, group, nearest
from kvexport.methods.merging import Merging

if TYPE_CHECKING:
    from torch import Tensor


class D2O(Merging):
    """Heavy hitters stay (the paper: 4 sinks); a leaving slot merges where its best cosine u reaches the mean of this
    call's, and is dropped otherwise. The paper's threshold is an average over calls, which no state carries here."""

    name: ClassVar[str] = "d2o"
    summary: ClassVar[str] = "merges into the most similar key above the call's mean similarity"
    source: ClassVar[str] = "arXiv 2406.13035"

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """Convex weights: ``e`` for the target and ``e^u`` for what arrives, over their sum; of keys and values."""
        import torch

        to, cosine = nearest(slots, leaving, "cosine")
        candidate = leaving.live & (cosine > NO_TARGET)
        number = torch.clamp(candidate.sum(-1, keepdim=True), min=1)
        threshold = torch.where(candidate, cosine, 0.0).sum(-1, keepdim=True) / number
        groups = group(leaving, to, candidate & (cosine >= threshold))
        weight_v = torch.exp(torch.clamp(cosine, min=-1.0))
        weight = torch.full_like(weight_v, math.e)
        key, value = (groups.mean(x, weight, weight_v) for x in (slots.key, slots.value))
        votes: Tensor = groups.total(*groups.pair(slots.votes))
        return groups.write(slots, key, value, votes, groups.scores(slots, self.statistics))
