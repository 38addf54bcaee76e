"""What merging methods share: whose statistic selects. Any selector goes with any rule of merging."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kvexport.methods.base import Method
from kvexport.methods.h2o import H2O
from kvexport.methods.pyramidinfer import PyramidInfer
from kvexport.methods.slots import Slots, Statistic
from kvexport.methods.snapkv import SnapKV
from kvexport.schema.policy import MergePolicy

if TYPE_CHECKING:
    from torch import Tensor

SELECTORS: dict[str, type[H2O | SnapKV | PyramidInfer]] = {"h2o": H2O, "snapkv": SnapKV, "pyramidinfer": PyramidInfer}


class Merging(Method):
    """Base of the methods that merge.

    selector: whose importance decides which slots are evicted: ``own``, or that of h2o, snapkv or pyramidinfer with
        their defaults. Then the score carries two statistics: the selector's, which selects, and the method's, which
        weighs.
    """

    selector: Literal["own", "h2o", "snapkv", "pyramidinfer"] = "own"

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The statistics of a method that selects by itself; the last one weighs. Unless overridden, the sum of
        probabilities."""
        return (Statistic("probability"),)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The selecting statistic first, the weighing one last; one for both where the method selects by itself."""
        if self.selector == "own":
            return self.own_statistics
        return (*SELECTORS[self.selector]().statistics, self.own_statistics[-1])

    def selected(self, own: MergePolicy) -> MergePolicy:
        """The method's `own` policy with the importance of its selector."""
        if self.selector == "own":
            return own
        other = SELECTORS[self.selector]().policy()
        return replace(own, select=other.select, pooled=other.pooled, mean_adds=False)

    def importance(self, slots: Slots, target: Tensor) -> Tensor:
        """[B, H, C] float32: the importance by which a method without a policy selects; arguments as of
        `keep_score`."""
        from kvexport.methods.primitives.select import importance

        return importance(self.selected(MergePolicy(select="score")), slots, target)

    def keep_score(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """The policy's, and of a method without one the importance."""
        return self.importance(slots, target) if self.policy() is None else super().keep_score(slots, target, count)
