"""The uncompressed cache: capacity is the longest sequence, and only what a sliding window has passed is evicted."""

from __future__ import annotations

from typing import ClassVar

from kvexport.methods.base import Method
from kvexport.schema.policy import MergePolicy


class Full(Method):
    """No compression: the baseline every method is measured against."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "uncompressed: capacity is the longest sequence"
    source: ClassVar[str] = "-"
    compresses: ClassVar[bool] = False

    def policy(self) -> MergePolicy:
        """Nothing is chosen."""
        return MergePolicy()
