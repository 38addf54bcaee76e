"""ZeroMerge (arXiv 2503.10714): a few residual slots take in evicted ones, as running means; votes count by a power
below one."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class ZeroMerge(Merging):
    """Three regions beside the sinks: recent, context (the lowest score is evicted) and residual, which evicted slots
    merge into.

    Residual are slots that have merged before, and where those are fewer than the region holds, the lowest scores of
    the kept ones.
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

    def policy(self) -> MergePolicy:
        """The decayed sum selects, merged slots last; a running mean in the residual slot of the largest dot
        product."""
        return self.selected(
            MergePolicy(select="score", merged_last=True, merge="running_mean", measure="dot", residual=self.residual)
        )
