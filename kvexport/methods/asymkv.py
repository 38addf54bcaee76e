"""AsymKV (arXiv 2506.05410): neighbouring pairs merge, keys by their Fisher information, values as sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvexport.methods.base import Slots
from kvexport.methods.joint import Groups
from kvexport.methods.pairs import NeighbourPairs

if TYPE_CHECKING:
    from torch import Tensor


class AsymKV(NeighbourPairs):
    """A surrogate: the paper's Fisher weights need a backward pass, which no deployed graph has. Here a key weighs by
    the probability it has accumulated. All else is the paper's: pairs, one rotary frame, summed values and counts
    (never clipped)."""

    name: ClassVar[str] = "asymkv"
    summary: ClassVar[str] = "neighbouring pairs merge, keys by attention (forward surrogate of Fisher weights)"
    source: ClassVar[str] = "arXiv 2506.05410"

    def key_weights(self, slots: Slots, groups: Groups) -> tuple[Tensor, Tensor]:
        """The accumulated probabilities."""
        return groups.pair(slots.score[:, :, -1])
