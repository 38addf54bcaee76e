"""The base class of AsymKV and KVSlimmer, which merge neighbouring cache slots in pairs."""

from typing import ClassVar

from kvexport.methods.merging import Merging
from kvexport.schema.policy import MergePolicy


class NeighbourPairs(Merging):
    """A method that merges neighbouring cache slots in pairs, the least attended pairs first.

    Sinks (first positions) and recent slots are in no pair. If merging pairs does not free enough slots, the least
    attended slots are dropped. To avoid such drops, the budget minus sinks and recent slots should be at least the
    number of slots that are evicted at once.

    Attributes:
        share_pairs: Whether all heads of a layer choose the same pairs, by the sum of their attention.
    """

    rotary: ClassVar[bool] = True

    share_pairs: bool = False

    @property
    def vote_exponent(self) -> float:
        """The factor alpha is 1: a slot that stands for n tokens (its votes) gets the bias ln(n) on its logit.

        The papers store the sum of the merged values and attend with ``sum e^l v / sum n e^l`` for a slot's logit l and
        its number n of tokens. A softmax over mean values, with ln n added to the logits, has the same output.
        """
        return 1.0

    def policy(self) -> MergePolicy:
        """Return the rule: merge the pairs with the least attention, and weight both keys by the last statistic."""
        return self.selected(MergePolicy(select="score", merge="pair", share_pairs=self.share_pairs))
