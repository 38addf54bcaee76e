"""What merging methods share: whose statistic selects what leaves. Any selector goes with any rule of merging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvexport.methods.base import Method, Slots, Statistic
from kvexport.methods.h2o import H2O
from kvexport.methods.pyramidinfer import PyramidInfer
from kvexport.methods.snapkv import SnapKV

if TYPE_CHECKING:
    from torch import Tensor

SELECTORS: dict[str, type[Method]] = {"h2o": H2O, "snapkv": SnapKV, "pyramidinfer": PyramidInfer}


class Merging(Method):
    """Base of the methods that merge.

    selector: whose importance decides what leaves: ``own``, or that of h2o, snapkv or pyramidinfer with their defaults.
        Then the score
        carries two statistics: the selector's, which selects, and the method's, which weighs.
    """

    selector: Literal["own", "h2o", "snapkv", "pyramidinfer"] = "own"

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """What the method keeps when it selects by itself; the last one weighs. Unless overridden, the sum of
        probabilities."""
        return (Statistic("probability"),)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The selecting statistic first, the weighing one last; one for both where the method selects by itself."""
        if self.selector == "own":
            return self.own_statistics
        return (*SELECTORS[self.selector]().statistics, self.own_statistics[-1])

    def own_importance(self, slots: Slots) -> Tensor:
        """[B, H, C]: the method's own importance of a slot. Unless overridden, its first statistic."""
        return slots.score[:, :, 0]

    def importance(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """[B, H, C] float32: the importance by which slots are selected; arguments as of `priority`."""
        if self.selector == "own":
            return self.own_importance(slots)
        return SELECTORS[self.selector]().priority(slots, target, count)

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """Unless overridden, the importance."""
        return self.importance(slots, target, count)
