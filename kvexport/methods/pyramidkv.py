"""PyramidKV (arXiv 2406.02069): SnapKV with larger budgets for the lower layers."""

from typing import ClassVar, Literal

from kvexport.methods.snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV's eviction rule with layer budgets that fall linearly from the first layer to the last.

    The setting `cache.allocation` of a recipe replaces the linear rule of layer budgets.
    """

    name: ClassVar[str] = "pyramidkv"
    summary: ClassVar[str] = "snapkv with budgets falling linearly over the layers"
    source: ClassVar[str] = "arXiv 2406.02069"
    allocation: ClassVar[Literal["uniform", "cosine", "pyramid"]] = "pyramid"
