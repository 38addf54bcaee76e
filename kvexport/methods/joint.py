"""Joint merges: several leaving slots may share a target and then merge with it at once.

Everything is computed per leaving slot, of which there are few, and only the targets' rows are written. All leaving slots of one group
compute the same row; the first of them writes it to the target, the others to their own slot, which is dropped anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvexport.methods.base import Leaving, Slots, gather_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Who merges with whom. slot, to [B, H, V] int64: the leaving slot and its target; merges [B, H, V] bool; same [B, H, V, V] float32:
    1 where both merge into one target; writes [B, H, V] int64: where row v of a result goes."""

    slot: Tensor
    to: Tensor
    merges: Tensor
    same: Tensor
    writes: Tensor

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, H, C, ...] of the targets and of the leaving slots, each [B, H, V, ...] in float32."""
        return gather_rows(x, self.to).float(), gather_rows(x, self.slot).float()

    def total(self, own: Tensor, arriving: Tensor) -> Tensor:
        """Of every group: the target's `own` plus all that is `arriving`; [B, H, V] or [B, H, V, D]."""
        if own.dim() == 3:
            return own + (self.same @ arriving[..., None])[..., 0]
        return own + self.same @ arriving

    def top(self, own: Tensor, arriving: Tensor) -> Tensor:
        """The largest value of every group; [B, H, V]."""
        import torch

        return torch.maximum(own, torch.where(self.same > 0, arriving[:, :, None, :], -torch.inf).amax(-1))

    def write(self, slots: Slots, key: Tensor, value: Tensor, votes: Tensor, score: Tensor) -> Slots:
        """`slots` with every group's key, value [B, H, V, D], votes [B, H, V] and score [B, H, V, K] in its target; the position is the
        group's latest."""
        import torch

        own, arriving = (gather_rows(slots.position, index) for index in (self.to, self.slot))
        latest = torch.where(self.same > 0, arriving[:, :, None, :], -1).amax(-1)
        return replace(
            slots,
            key=self._put(slots.key, key),
            value=self._put(slots.value, value),
            votes=self._put(slots.votes, votes),
            score=torch.stack([self._put(slots.score[:, :, k], score[..., k]) for k in range(score.shape[-1])], dim=2),
            position=self._put(slots.position, torch.maximum(own, latest)),
        )

    def _put(self, x: Tensor, rows: Tensor) -> Tensor:
        import torch

        # Without a target the row is 0/0, and NaN in an empty slot would outlive it.
        rows = torch.where(self.merges if rows.dim() == 3 else self.merges[..., None], rows, 0)
        if x.dim() == 3:
            return x.scatter(2, self.writes, rows.to(x.dtype))
        batch, heads, _ = self.writes.shape
        lane = torch.arange(batch, device=x.device)[:, None, None].expand_as(self.writes)
        head = torch.arange(heads, device=x.device)[None, :, None].expand_as(self.writes)
        return x.index_put((lane, head, self.writes), rows.to(x.dtype))


def group(leaving: Leaving, to: Tensor, merges: Tensor) -> Groups:
    """The groups of leaving slots that merge (`merges` [B, H, V] bool) into target slots `to` [B, H, V] int64."""
    import torch

    together = (to[..., :, None] == to[..., None, :]) & merges[..., :, None] & merges[..., None, :]
    row = torch.arange(to.shape[-1], device=to.device)
    follows = (together & (row[None, :] < row[:, None])).any(-1)
    writes = torch.where(merges & ~follows, to, leaving.slot)
    return Groups(leaving.slot, to, merges, together.float(), writes)


def unit(key: Tensor) -> Tensor:
    """Keys over their norm, in float32; a zero key stays zero."""
    import torch

    key = key.float()
    return key / torch.clamp(key.norm(dim=-1, keepdim=True), min=1e-12)


def nearest_by_cosine(slots: Slots, leaving: Leaving) -> tuple[Tensor, Tensor]:
    """The most similar target of every leaving slot and their keys' cosine, each [B, H, V]; -2 where there is no target. Of equals the
    first, which has the lowest position."""
    import torch

    keys = unit(slots.key)
    similarity = gather_rows(keys, leaving.slot) @ keys.transpose(-1, -2)  # [B, H, V, C]
    best, to = torch.where(leaving.target[:, :, None, :], similarity, -2.0).max(dim=-1)
    return to, best
