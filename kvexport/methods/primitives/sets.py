"""Merge sets: a target and all the evicted slots that merge into it, at once.

Everything is computed per evicted slot, of which there are few, and only the targets' rows are written. All evicted
slots of one set compute the same row; the first of them writes it to the target, the others to their own slot, which is
dropped anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvexport.methods.slots import Evicted, Slots, Statistic, gather_rows
from kvexport.schema.policy import NO_GATE

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = NO_GATE


@dataclass(frozen=True)
class MergeSets:
    """Who merges with whom. index, to [B, H, V] int64: the evicted slot and its target; merges [B, H, V] bool; same [B,
    H, V, V] float32: 1 where both merge into one target; writes [B, H, V] int64: where row v of a result goes."""

    index: Tensor
    to: Tensor
    merges: Tensor
    same: Tensor
    writes: Tensor

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, H, C, ...] of the targets and of the evicted slots, each [B, H, V, ...] in float32."""
        return gather_rows(x, self.to).float(), gather_rows(x, self.index).float()

    def sum(self, target: Tensor, evicted: Tensor) -> Tensor:
        """Of every set: the target's `target` plus all that is `evicted`; [B, H, V] or [B, H, V, D]."""
        if target.dim() == 3:
            return target + (self.same @ evicted[..., None])[..., 0]
        return target + self.same @ evicted

    def largest(self, target: Tensor, evicted: Tensor) -> Tensor:
        """The largest value of every set; [B, H, V]."""
        import torch

        return torch.maximum(target, torch.where(self.same > 0, evicted[:, :, None, :], -torch.inf).amax(-1))

    def mean(self, x: Tensor, weight: Tensor, weight_v: Tensor) -> Tensor:
        """The mean of x [B, H, C, D] over every set, by the weights [B, H, V] of the target and of the evicted slots;
        [B, H, V, D]."""
        target, evicted = self.pair(x)
        total = self.sum(weight[..., None] * target, weight_v[..., None] * evicted)
        return total / self.sum(weight, weight_v)[..., None]

    def latest(self, slots: Slots) -> Tensor:
        """Every set's latest position; [B, H, V]."""
        import torch

        target, evicted = (gather_rows(slots.position, index) for index in (self.to, self.index))
        return torch.maximum(target, torch.where(self.same > 0, evicted[:, :, None, :], -1).amax(-1))

    def scores(self, slots: Slots, statistics: tuple[Statistic, ...]) -> Tensor:
        """The statistics of every set; [B, H, V, K]. Probability mass adds; of averages of exp(logit) it is the mean
        by votes (``S = sum p S / sum p``, kept as ln S); what is no statistic stays the target's."""
        import torch

        votes, votes_v = self.pair(slots.votes)
        rows = []
        for k, statistic in enumerate(statistics):
            score, score_v = self.pair(slots.score[:, :, k])
            if statistic.kind == "probability":
                rows.append(self.sum(score, score_v))
            elif statistic.kind == "log_ema":
                top = self.largest(score, score_v)
                share_v = votes_v * torch.exp(torch.where(self.merges, score_v - top, -torch.inf))
                share = self.sum(votes * torch.exp(score - top), share_v) / self.sum(votes, votes_v)
                rows.append(top + torch.log(share))
            else:
                rows.append(score)
        return torch.stack(rows, dim=-1)

    def write(self, slots: Slots, key: Tensor | None, value: Tensor, votes: Tensor, score: Tensor) -> Slots:
        """`slots` with every set's key (None: the target's stays), value [B, H, V, D], votes [B, H, V] and score [B,
        H, V, K] in its target; the position is the set's latest."""
        import torch

        return replace(
            slots,
            key=slots.key if key is None else self._put(slots.key, key),
            value=self._put(slots.value, value),
            votes=self._put(slots.votes, votes),
            score=torch.stack([self._put(slots.score[:, :, k], score[..., k]) for k in range(score.shape[-1])], dim=2),
            position=self._put(slots.position, self.latest(slots)),
        )

    def _put(self, x: Tensor, rows: Tensor) -> Tensor:
        import torch

        # Without a target the row is 0/0, and NaN in an empty slot would outlive it.
        rows = torch.where(self.merges if rows.dim() == 3 else self.merges[..., None], rows, 0)
        if x.dim() == 3:
            return x.scatter(2, self.writes, rows.to(x.dtype))
        batch, heads, _ = self.writes.shape
        lane = torch.arange(batch, device=x.device)[:, None, None].expand(self.writes.shape)
        head = torch.arange(heads, device=x.device)[None, :, None].expand(self.writes.shape)
        return x.index_put((lane, head, self.writes), rows.to(x.dtype))


def merge_sets(evicted: Evicted, to: Tensor, merges: Tensor) -> MergeSets:
    """The sets of evicted slots that merge (`merges` [B, H, V] bool) into target slots `to` [B, H, V] int64."""
    import torch

    together = (to[..., :, None] == to[..., None, :]) & merges[..., :, None] & merges[..., None, :]
    row = torch.arange(to.shape[-1], device=to.device)
    follows = (together & (row[None, :] < row[:, None])).any(-1)
    writes = torch.where(merges & ~follows, to, evicted.index)
    return MergeSets(evicted.index, to, merges, together.float(), writes)


def squared_distances(x: Tensor, rows: Tensor) -> Tensor:
    """Of rows [B, H, V] of x [B, H, C, D] to all of them, to an error of 1e-6 of their squared norms; [B, H, V, C]
    float32."""
    x = x.float()
    square = (x * x).sum(-1)
    product = gather_rows(x, rows) @ x.transpose(-1, -2)
    return (square[:, :, None, :] + gather_rows(square, rows)[..., None] - 2.0 * product).clamp(min=0.0)


def unit(key: Tensor) -> Tensor:
    """Keys over their norm, in float32; a zero key stays zero."""
    import torch

    key = key.float()
    return key / torch.clamp(key.norm(dim=-1, keepdim=True), min=1e-12)


def nearness(slots: Slots, index: Tensor, measure: Literal["cosine", "dot", "distance"]) -> Tensor:
    """How near the keys at index [B, H, V] are to all keys: the cosine, the dot product, or minus the square of the
    distance (to an error of 1e-6 of the keys' squared norms); [B, H, V, C]."""
    keys = unit(slots.key) if measure == "cosine" else slots.key.float()
    near = gather_rows(keys, index) @ keys.transpose(-1, -2)
    if measure == "distance":
        square = (keys * keys).sum(-1)
        near = 2.0 * near - square[:, :, None, :] - gather_rows(square, index)[..., None]
    return near


def nearest(slots: Slots, evicted: Evicted, measure: Literal["cosine", "dot", "distance"]) -> tuple[Tensor, Tensor]:
    """The nearest target of every evicted slot and its `nearness`, each [B, H, V]; ``NO_TARGET`` where there is none.
    Of equals the first, which has the lowest position."""
    import torch

    near = nearness(slots, evicted.index, measure)
    best, to = torch.where(evicted.can_receive[:, :, None, :], near, NO_TARGET).max(dim=-1)
    return to, best
