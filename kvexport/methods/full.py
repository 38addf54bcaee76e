"""The uncompressed cache: the capacity is the longest sequence.

Only entries that a sliding window has passed are evicted.
"""

from __future__ import annotations

from typing import ClassVar

from kvexport.methods.base import Method
from kvexport.schema.policy import MergePolicy


class Full(Method):
    """No compression: the baseline that every method is measured against."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "uncompressed: capacity is the longest sequence"
    source: ClassVar[str] = "-"
    compresses: ClassVar[bool] = False

    def policy(self) -> MergePolicy:
        """Return the default policy, which is never applied."""
        return MergePolicy()
