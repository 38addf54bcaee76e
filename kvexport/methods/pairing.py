"""The base class of AsymKV and KVSlimmer, which merge neighbouring cache slots in pairs."""

from __future__ import annotations

from typing import ClassVar

from kvexport.methods.merging import Merging
from kvexport.schema.policy import MergePolicy


class NeighbourPairs(Merging):
    """A method that merges neighbouring cache slots in pairs, the least attended pairs first.

    Sinks (first positions) and recent slots are in no pair. If merging pairs does not free enough slots, the least
    attended slots are dropped. To avoid this, a budget should have at least as many slots besides sinks and recent ones
    as are evicted at once.

    Attributes:
        share_pairs: Whether all heads of a layer choose the same pairs, by the sum of their attention.
    """

    rotary: ClassVar[bool] = True

    share_pairs: bool = False

    @property
    def vote_exponent(self) -> float:
        """The factor alpha of the attention bias ``alpha * ln(votes)``, which is 1 for AsymKV and KVSlimmer.

        The papers store the sum v of the merged values and attend with ``sum e^l v / sum n e^l``, where l is a slot's
        logit and n its number of merged tokens. The same output is a softmax over mean values with ln n added to the
        logits.
        """
        return 1.0

    def policy(self) -> MergePolicy:
        """Return the rule of a method that merges pairs as a merge policy, the data that native kernels run.

        Pairs of neighbouring slots are ranked by importance, and their keys are weighted by the slots' last statistic.
        """
        return self.selected(MergePolicy(select="score", merge="pair", share_pairs=self.share_pairs))
