"""AsymKV (arXiv 2506.05410): neighbouring pairs merge, keys by their Fisher information, values as sums."""

from __future__ import annotations

from typing import ClassVar

from kvexport.methods.pairing import NeighbourPairs


class AsymKV(NeighbourPairs):
    """A surrogate: the paper's Fisher weights need a backward pass, which no deployed graph has. Here a key weighs by
    the probability it has accumulated. All else is the paper's: pairs, one rotary frame, summed values and counts
    (never clipped)."""

    name: ClassVar[str] = "asymkv"
    summary: ClassVar[str] = "neighbouring pairs merge, keys by attention (forward surrogate of Fisher weights)"
    source: ClassVar[str] = "arXiv 2506.05410"
