"""The method `full`, which does not compress the KV cache: the cache has a slot for every token.

Only entries that a sliding window has passed are evicted.
"""

from typing import ClassVar

from kvexport.methods.base import Method
from kvexport.schema.policy import MergePolicy


class Full(Method):
    """The uncompressed KV cache: the baseline that every compression method is measured against."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "uncompressed: capacity is the longest sequence"
    source: ClassVar[str] = "-"
    compresses: ClassVar[bool] = False

    def policy(self) -> MergePolicy:
        """Return a default merge rule, which is never applied, because this method evicts nothing."""
        return MergePolicy()
