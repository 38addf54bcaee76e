"""The base class of methods that merge evicted cache slots: any selector combines with any merge rule.

A selector is the part of a method that decides which slots are evicted.
"""

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
    """A compression method that merges evicted cache slots into kept ones.

    Attributes:
        selector: The method whose importance ranks slots for eviction: ``own`` for the merging method itself, or h2o,
            snapkv or pyramidinfer with their defaults. With another method's selector every slot has two statistics:
            the selector's, which ranks slots, and the merging method's, which weights merges.
    """

    selector: Literal["own", "h2o", "snapkv", "pyramidinfer"] = "own"

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The attention statistics of a slot with ``selector: own``; the last of them weights merges."""
        return (Statistic("probability"),)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistics of a slot: those by which the selector ranks slots, and last the weight in a merge."""
        if self.selector == "own":
            return self.own_statistics
        return (*SELECTORS[self.selector]().statistics, self.own_statistics[-1])

    def selected(self, policy: MergePolicy) -> MergePolicy:
        """Return a merge rule in which the method that the setting `selector` names ranks slots for eviction."""
        if self.selector == "own":
            return policy
        selector = SELECTORS[self.selector]().policy()
        return replace(policy, select=selector.select, pooled=selector.pooled, mean_adds=False)

    def importance(self, slots: Slots, unprotected: Tensor) -> Tensor:
        """Return each slot's importance, [B, H, C] float32: the slots of lowest importance are evicted first."""
        from kvexport.methods.primitives.select import importance

        return importance(self.selected(MergePolicy(select="score")), slots, unprotected)

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return a score for each slot, lowest evicted first: by `policy`, or by `importance` if that is None."""
        return (
            self.importance(slots, unprotected)
            if self.policy() is None
            else super().keep_score(slots, unprotected, count)
        )
