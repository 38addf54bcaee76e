"""AsymKV (arXiv 2506.05410): neighbouring cache slots merge in pairs, keys weighted by their Fisher information."""

from typing import ClassVar

from kvexport.methods.pairing import NeighbourPairs


class AsymKV(NeighbourPairs):
    """A forward-only surrogate of AsymKV (arXiv 2506.05410): neighbouring cache slots merge in pairs.

    The AsymKV paper weights the keys of a pair by their Fisher information, which needs a backward pass that no
    deployed graph has. kvexport weights a key by the attention probability that its slot has accumulated. As in the
    paper, both keys of a pair are rotated (RoPE) to one position, and values and token counts add up. Unlike in the
    authors' code, counts are never clipped.
    """

    name: ClassVar[str] = "asymkv"
    summary: ClassVar[str] = "neighbouring pairs merge, keys by attention (forward surrogate of Fisher weights)"
    source: ClassVar[str] = "arXiv 2506.05410"
