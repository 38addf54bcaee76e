"""SnapKV (arXiv 2404.14469): what the last queries of the prompt attend to, and its neighbours, stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from kvexport.methods.base import Method, Slots, Statistic

if TYPE_CHECKING:
    from torch import Tensor


class SnapKV(Method):
    """The attention of an observation window, pooled over neighbouring positions; what leaves is dropped.

    window: the last so many queries of a call observe (the paper's window closes the prompt; of a decoding step the one
        query does).
    pool: positions pooled around each token, an odd number; those that are protected or gone count as zero.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "most attended by the prompt's last queries, pooled over neighbours, stays"
    source: ClassVar[str] = "arXiv 2404.14469"

    window: int = Field(64, ge=1)
    pool: int = Field(5, ge=1)

    @field_validator("pool")
    @classmethod
    def _odd(cls, pool: int) -> int:
        if pool % 2 == 0:
            raise ValueError(f"an odd number of positions is pooled around each token, this is {pool}")
        return pool

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sum of probabilities over the observation window, mean over a query-head group; it orders as its mean
        does."""
        return (Statistic("probability", 1.0, self.window),)

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """``sum_{|o| <= pool // 2} A[position + o]`` over unprotected slots, added up in order of position, so that
        slots with the same neighbours tie."""
        import torch

        observed = torch.where(target, slots.score[:, :, 0], 0.0)
        place = torch.arange(target.shape[-1], device=target.device)
        reach, pooled = self.pool // 2, torch.zeros_like(observed)
        # Slots are in order of position: a neighbour within reach is no further away in slots.
        for offset in range(-reach, reach + 1):
            there = torch.clamp(torch.clamp(place + offset, min=0), max=target.shape[-1] - 1)
            near = (slots.position.index_select(-1, there) - slots.position).abs() <= reach
            pooled = pooled + torch.where((place + offset == there) & near, observed.index_select(-1, there), 0.0)
        return pooled
