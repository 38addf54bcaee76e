"""StreamingLLM (arXiv 2309.17453): the first tokens and a recent window stay, everything between is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvexport.methods.base import Method, Slots

if TYPE_CHECKING:
    from torch import Tensor


class Streaming(Method):
    """Sinks and a recent window; the oldest slot after the sinks leaves."""

    name: ClassVar[str] = "streaming"
    summary: ClassVar[str] = "sinks and a recent window; the oldest leaves"
    source: ClassVar[str] = "arXiv 2309.17453"

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """The position: the oldest leaves first."""
        return slots.position.float()
