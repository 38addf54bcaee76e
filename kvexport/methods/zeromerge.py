"""ZeroMerge (arXiv 2503.10714): a few residual slots take in what leaves, as running means; votes count by a power
below one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvexport.methods.base import Leaving, Slots, Statistic
from kvexport.methods.joint import group, nearest, unprotected
from kvexport.methods.merging import Merging

if TYPE_CHECKING:
    from torch import Tensor


class ZeroMerge(Merging):
    """Three regions beside the sinks: recent, context (the lowest score leaves) and residual, which what leaves merges
    into.

    Residual are slots that have merged before, and where those are fewer than the region holds, the lowest scores of
    what stays.
    alpha: power of the votes at read time. decay: of the score, per query. residual: the region's share of the
    unprotected slots (the paper's budget: 0.22 residual to 0.44 context).
    """

    name: ClassVar[str] = "zeromerge"
    summary: ClassVar[str] = "the lowest score merges into a residual slot, as a running mean"
    source: ClassVar[str] = "arXiv 2503.10714"

    alpha: float = Field(0.6, gt=0.0, le=1.0)
    decay: float = Field(0.98, gt=0.0, le=1.0)
    residual: float = Field(0.33, gt=0.0, le=1.0)

    @property
    def vote_exponent(self) -> float:
        """The paper's alpha."""
        return self.alpha

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The decayed sum of (biased) probabilities."""
        return (Statistic("probability", self.decay),)

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """The importance; slots that have merged leave last, in order of position."""
        import torch

        return torch.where(slots.votes > 1, 1e38, self.importance(slots, target, count))

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """``k = sum w k / sum w``, likewise v, ``w = sum w`` into the residual key of the largest dot product."""
        import torch

        held = leaving.target
        count = torch.clamp((self.residual * held.sum(-1, keepdim=True)).floor(), min=1.0)
        # Those that have merged first, then the lowest of what stays.
        importance = self.importance(slots, unprotected(leaving), leaving.slot.shape[-1])
        order = (
            torch.where(held, torch.where(slots.votes > 1, -1e38, importance), torch.inf)
            .sort(dim=-1, stable=True)
            .indices
        )
        places = torch.arange(held.shape[-1], device=held.device).expand_as(order)
        residual = held & (torch.zeros_like(order).scatter(-1, order, places) < count)
        leaving = Leaving(leaving.slot, leaving.live, residual)
        to, _ = nearest(slots, leaving, "dot")
        groups = group(leaving, to, leaving.live & residual.any(-1, keepdim=True))
        votes, votes_v = groups.pair(slots.votes)
        key, value = (groups.mean(x, votes, votes_v) for x in (slots.key, slots.value))
        return groups.write(slots, key, value, groups.total(votes, votes_v), groups.scores(slots, self.statistics))
