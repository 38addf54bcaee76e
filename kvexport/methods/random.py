"""Random eviction of cache slots, the baseline that every other choice of slots must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvexport.methods.base import Method
from kvexport.methods.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLIER = 1103515245  # below 2^31, so that every product fits in int64


class Random(Method):
    """Random eviction: a hash of each slot's position ranks slots, so every backend and run evicts the same slots."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "slots to evict are chosen by a hash of their position and dropped"
    source: ClassVar[str] = "-"

    seed: int = Field(0, ge=0, lt=2**31, description="The seed of the hash.")

    @property
    def merges_values_as_keys(self) -> bool:
        """Whether a merge leaves keys and values means with equal weights: true, because nothing merges."""
        return True

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return pseudo-random keep scores: 24 bits of a hash of each slot's position and the seed."""
        import torch

        x = slots.position.to(torch.int64)
        for _ in range(3):
            x = (x * MULTIPLIER + self.seed + 12345) % 2**32
            x = x % 2**16 * 2**16 + x // 2**16
        return (x // 2**8).float()
