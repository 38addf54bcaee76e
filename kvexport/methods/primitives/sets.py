"""Merge sets: a target, which is a kept cache slot, and all the evicted slots that merge into it at once.

The merged key, value, votes (token count) and scores are computed once for each evicted slot, because few slots are
evicted. All evicted slots of one set therefore compute the same result. The first evicted slot writes the result to the
target. All further evicted slots write it to their own slots, which are dropped afterwards.
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
    """The evicted cache slots and the kept slots that they merge into.

    A merge set is a kept slot, the target, with all evicted slots that merge into it.

    Attributes:
        index: [B, H, V] int64, the evicted slots.
        targets: [B, H, V] int64, the target of each evicted slot.
        merges: [B, H, V] bool. False for evicted slots that are dropped.
        same: [B, H, V, V] float32. 1 if two evicted slots merge into one target.
        writes: [B, H, V] int64, the slot that row v of a result is written to.
    """

    index: Tensor
    targets: Tensor
    merges: Tensor
    same: Tensor
    writes: Tensor

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x [B, H, C, ...] at the target slots and at the evicted slots, each [B, H, V, ...] in float32."""
        return gather_rows(x, self.targets).float(), gather_rows(x, self.index).float()

    def sum(self, target: Tensor, evicted: Tensor) -> Tensor:
        """Return, for each evicted slot, the sum of a quantity over all slots that merge with it; [B, H, V, ...]."""
        if target.dim() == 3:
            return target + (self.same @ evicted[..., None])[..., 0]
        return target + self.same @ evicted

    def largest(self, target: Tensor, evicted: Tensor) -> Tensor:
        """Return, for each evicted slot, the largest value of a quantity among all slots that merge with it."""
        import torch

        return torch.maximum(target, torch.where(self.same > 0, evicted[:, :, None, :], -torch.inf).amax(-1))

    def mean(self, x: Tensor, target_weight: Tensor, evicted_weight: Tensor) -> Tensor:
        """Return, for each evicted slot, the weighted mean of x [B, H, C, D] over all slots that merge with it."""
        target, evicted = self.pair(x)
        total = self.sum(target_weight[..., None] * target, evicted_weight[..., None] * evicted)
        return total / self.sum(target_weight, evicted_weight)[..., None]

    def latest(self, slots: Slots) -> Tensor:
        """Return, for each evicted slot, the latest token position [B, H, V] of all slots that merge with it."""
        import torch

        target, evicted = (gather_rows(slots.position, index) for index in (self.targets, self.index))
        return torch.maximum(target, torch.where(self.same > 0, evicted[:, :, None, :], -1).amax(-1))

    def scores(self, slots: Slots, statistics: tuple[Statistic, ...]) -> Tensor:
        """Return the K merged attention statistics [B, H, V, K] of each evicted slot's merge set.

        Sums of attention probabilities add up. Averages of exp(logit), which are stored as logarithms, become their
        mean weighted by votes (token counts). A statistic of kind ``none`` keeps the kept slot's value.
        """
        import torch

        target_votes, evicted_votes = self.pair(slots.votes)
        rows = []
        for k, statistic in enumerate(statistics):
            target, evicted = self.pair(slots.score[:, :, k])
            if statistic.kind == "probability":
                rows.append(self.sum(target, evicted))
            elif statistic.kind == "log_ema":
                top = self.largest(target, evicted)
                evicted_sum = evicted_votes * torch.exp(torch.where(self.merges, evicted - top, -torch.inf))
                total = self.sum(target_votes * torch.exp(target - top), evicted_sum)
                rows.append(top + torch.log(total / self.sum(target_votes, evicted_votes)))
            else:
                rows.append(target)
        return torch.stack(rows, dim=-1)

    def write(self, slots: Slots, key: Tensor | None, value: Tensor, votes: Tensor, score: Tensor) -> Slots:
        """Write the merged key, value, token count and statistics of each set into its target slot; return all slots.

        The target's position becomes the latest position of the set.
        """
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

        # The row of a slot without a target is 0/0. A NaN in a slot would remain there after the slot is emptied.
        rows = torch.where(self.merges if rows.dim() == 3 else self.merges[..., None], rows, 0)
        if x.dim() == 3:
            return x.scatter(2, self.writes, rows.to(x.dtype))
        batch, heads, _ = self.writes.shape
        lane = torch.arange(batch, device=x.device)[:, None, None].expand(self.writes.shape)
        head = torch.arange(heads, device=x.device)[None, :, None].expand(self.writes.shape)
        return x.index_put((lane, head, self.writes), rows.to(x.dtype))


def merge_sets(evicted: Evicted, targets: Tensor, merges: Tensor) -> MergeSets:
    """Return merge sets: the evicted slots that merge (`merges`), grouped by the slot they merge into (`targets`)."""
    import torch

    together = (targets[..., :, None] == targets[..., None, :]) & merges[..., :, None] & merges[..., None, :]
    row = torch.arange(targets.shape[-1], device=targets.device)
    follows = (together & (row[None, :] < row[:, None])).any(-1)
    writes = torch.where(merges & ~follows, targets, evicted.index)
    return MergeSets(evicted.index, targets, merges, together.float(), writes)


def squared_distances(x: Tensor, rows: Tensor) -> Tensor:
    """Return the squared distances [B, H, V, C] between V vectors of x [B, H, C, D] and all its C vectors.

    The V vectors are those at the indices `rows`. The rounding error is about 1e-6 of the vectors' squared norms.
    """
    x = x.float()
    square = (x * x).sum(-1)
    product = gather_rows(x, rows) @ x.transpose(-1, -2)
    return (square[:, :, None, :] + gather_rows(square, rows)[..., None] - 2.0 * product).clamp(min=0.0)


def unit(key: Tensor) -> Tensor:
    """Return each key divided by its norm, in float32; a zero key stays zero."""
    import torch

    key = key.float()
    return key / torch.clamp(key.norm(dim=-1, keepdim=True), min=1e-12)


def nearness(slots: Slots, index: Tensor, measure: Literal["cosine", "dot", "distance"]) -> Tensor:
    """Return how near the keys at `index` [B, H, V] are to all C keys, [B, H, V, C]; a larger number is nearer.

    The measure is the cosine, the dot product, or minus the squared distance (with an error of about 1e-6 of the
    squared norms).
    """
    keys = unit(slots.key) if measure == "cosine" else slots.key.float()
    near = gather_rows(keys, index) @ keys.transpose(-1, -2)
    if measure == "distance":
        square = (keys * keys).sum(-1)
        near = 2.0 * near - square[:, :, None, :] - gather_rows(square, index)[..., None]
    return near


def nearest(slots: Slots, evicted: Evicted, measure: Literal["cosine", "dot", "distance"]) -> tuple[Tensor, Tensor]:
    """Return for every evicted slot the kept slot of the nearest key, and the nearness of the two; each [B, H, V].

    The nearness is ``NO_TARGET`` if no slot can receive. Among equally near targets the one of lowest position is
    chosen.
    """
    import torch

    near = nearness(slots, evicted.index, measure)
    best, targets = torch.where(evicted.can_receive[:, :, None, :], near, NO_TARGET).max(dim=-1)
    return targets, best
