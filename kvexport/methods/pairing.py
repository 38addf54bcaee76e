"""What AsymKV and KVSlimmer share: neighbouring slots merge in pairs (kvexport/methods/primitives/pairs.py)."""

from __future__ import annotations

from typing import ClassVar

from kvexport.methods.merging import Merging
from kvexport.schema.policy import MergePolicy


class NeighbourPairs(Merging):
    """Unprotected slots in order of position merge in pairs, the least attended first. Beyond what pairs can free,
    slots are dropped, least attended first: keep at least as many unprotected slots in the budget as are evicted at
    once.

    share_pairs: all heads of a layer choose the same pairs, by the sum of their attention.
    """

    rotary: ClassVar[bool] = True

    share_pairs: bool = False

    @property
    def vote_exponent(self) -> float:
        """``sum e^l v / sum n e^l`` with summed values is the softmax with ln n added, over mean values: votes in
        full."""
        return 1.0

    def policy(self) -> MergePolicy:
        """Pairs by their importance, keys weighed by the last statistic."""
        return self.selected(MergePolicy(select="score", merge="pair", share_pairs=self.share_pairs))
