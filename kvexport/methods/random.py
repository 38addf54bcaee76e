"""Random eviction: the floor that every selector has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvexport.methods.base import Method
from kvexport.methods.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLIER = 1103515245  # below 2^31, so that no product leaves int64


class Random(Method):
    """Evicted slots are drawn by a hash of their position, so that every backend and every run draws the same."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "a hash of the position decides; the rest is dropped"
    source: ClassVar[str] = "-"

    seed: int = Field(0, ge=0, lt=2**31, description="Of the hash.")

    def keep_score(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """Three rounds of ``x = (x m + seed) mod 2^32``, halves exchanged between them; the upper 24 bits."""
        import torch

        x = slots.position.to(torch.int64)
        for _ in range(3):
            x = (x * MULTIPLIER + self.seed + 12345) % 2**32
            x = x % 2**16 * 2**16 + x // 2**16
        return (x // 2**8).float()
