"""StreamingLLM (arXiv 2309.17453): the first tokens and a recent window are kept, and all between are dropped."""

from typing import ClassVar

from kvexport.methods.base import Method
from kvexport.schema.policy import MergePolicy


class Streaming(Method):
    """StreamingLLM: sinks (the first positions) and a recent window are kept; the oldest other slots are evicted."""

    name: ClassVar[str] = "streaming"
    summary: ClassVar[str] = "sinks and a recent window; the oldest are evicted"
    source: ClassVar[str] = "arXiv 2309.17453"

    def policy(self) -> MergePolicy:
        """Return the rule that first drops the slot of the oldest token."""
        return MergePolicy(select="position")
