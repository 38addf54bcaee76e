"""Joint merges: several leaving slots may share a target and then merge with it at once.

Everything is computed per leaving slot, of which there are few, and only the targets' rows are written. All leaving
slots of one group compute the same row; the first of them writes it to the target, the others to their own slot, which
is dropped anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvexport.methods.base import Leaving, Slots, Statistic, gather_rows

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = -1e38  # below every cosine, dot product and distance


@dataclass(frozen=True)
class Groups:
    """Who merges with whom. slot, to [B, H, V] int64: the leaving slot and its target; merges [B, H, V] bool; same [B,
    H, V, V] float32: 1 where both merge into one target; writes [B, H, V] int64: where row v of a result goes."""

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

    def mean(self, x: Tensor, weight: Tensor, weight_v: Tensor) -> Tensor:
        """The mean of x [B, H, C, D] over every group, by the weights [B, H, V] of the target and of the leaving slots;
        [B, H, V, D]."""
        own, arriving = self.pair(x)
        total = self.total(weight[..., None] * own, weight_v[..., None] * arriving)
        return total / self.total(weight, weight_v)[..., None]

    def latest(self, slots: Slots) -> Tensor:
        """Every group's latest position; [B, H, V]."""
        import torch

        own, arriving = (gather_rows(slots.position, index) for index in (self.to, self.slot))
        return torch.maximum(own, torch.where(self.same > 0, arriving[:, :, None, :], -1).amax(-1))

    def scores(self, slots: Slots, statistics: tuple[Statistic, ...]) -> Tensor:
        """The statistics of every group; [B, H, V, K]. Probability mass adds; of averages of exp(logit) it is the mean
        by votes (``S = sum p S / sum p``, kept as ln S); what is no statistic stays the target's."""
        import torch

        votes, votes_v = self.pair(slots.votes)
        rows = []
        for k, statistic in enumerate(statistics):
            score, score_v = self.pair(slots.score[:, :, k])
            if statistic.kind == "probability":
                rows.append(self.total(score, score_v))
            elif statistic.kind == "log_ema":
                top = self.top(score, score_v)
                share_v = votes_v * torch.exp(torch.where(self.merges, score_v - top, -torch.inf))
                share = self.total(votes * torch.exp(score - top), share_v) / self.total(votes, votes_v)
                rows.append(top + torch.log(share))
            else:
                rows.append(score)
        return torch.stack(rows, dim=-1)

    def write(self, slots: Slots, key: Tensor | None, value: Tensor, votes: Tensor, score: Tensor) -> Slots:
        """`slots` with every group's key (None: the target's stays), value [B, H, V, D], votes [B, H, V] and score [B,
        H, V, K] in its target; the position is the group's latest."""
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


def group(leaving: Leaving, to: Tensor, merges: Tensor) -> Groups:
    """The groups of leaving slots that merge (`merges` [B, H, V] bool) into target slots `to` [B, H, V] int64."""
    import torch

    together = (to[..., :, None] == to[..., None, :]) & merges[..., :, None] & merges[..., None, :]
    row = torch.arange(to.shape[-1], device=to.device)
    follows = (together & (row[None, :] < row[:, None])).any(-1)
    writes = torch.where(merges & ~follows, to, leaving.slot)
    return Groups(leaving.slot, to, merges, together.float(), writes)


def unprotected(leaving: Leaving) -> Tensor:
    """What was neither sink nor recent before anything left, for methods without `recent_receives`; [B, H, C] bool."""
    import torch

    return leaving.target | torch.zeros_like(leaving.target).scatter(-1, leaving.slot, leaving.live)


def zipped(
    slots: Slots, groups: Groups, logit: Tensor, mode: str, key_factor_max: float = math.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """Every group's key, value [B, H, V, D] and votes [B, H, V] by KeepKV's rule: ``w = p exp(logit)``, ``k = sum w k /
    sum w``, likewise
    v. logit [B, H, C]: ln of the score that weighs. mode: ``mean`` adds up votes; ``vote`` stores ``ln p = ln(sum w) -
    L``; ``key`` scales the key by ``(ln(sum w) - ln(sum p)) / L`` (Eq. 7), or is ``vote`` where that factor is outside
    [1/x, x], x `key_factor_max`; with ``L = sum w logit / sum w``."""
    import torch

    votes, votes_v = groups.pair(slots.votes)
    own, arriving = groups.pair(logit)
    top = groups.top(own, arriving)
    # Relative to the largest: a group that no query has seen has logits of -1e30, whose rounding would drown every
    # vote.
    own, arriving = own - top, arriving - top
    weight, weight_v = votes * torch.exp(own), votes_v * torch.exp(torch.where(groups.merges, arriving, -torch.inf))
    key, value = (groups.mean(x, weight, weight_v) for x in (slots.key, slots.value))
    count = groups.total(votes, votes_v)
    if mode == "mean":
        return key, value, count
    total = groups.total(weight, weight_v)
    log_total = torch.log(total)
    mean_logit = groups.total(weight * own, weight_v * arriving) / total
    fractional = torch.exp(log_total - mean_logit)
    if mode == "vote":
        return key, value, fractional
    factor = key_factor(log_total - torch.log(count) + top, mean_logit + top)
    limit = min(key_factor_max, torch.finfo(torch.float32).max)  # the pole is outside every limit
    usable = (factor >= 1.0 / limit) & (factor <= limit)
    return torch.where(usable[..., None], factor[..., None] * key, key), value, torch.where(usable, count, fractional)


def key_factor(log_mean: Tensor, mean_logit: Tensor) -> Tensor:
    """``ln m / L`` of Eq. 7; infinite at the pole, and 1 where both agree to rounding, for there L may be 0 and the
    ratio noise."""
    import torch

    ratio = log_mean / torch.where(mean_logit == 0.0, 1.0, mean_logit)
    ratio = torch.where(mean_logit == 0.0, torch.inf, ratio)
    agree = (log_mean - mean_logit).abs() <= 1e-6 * torch.clamp(mean_logit.abs(), min=1.0)
    return torch.where(agree, 1.0, ratio)


@dataclass(frozen=True)
class Candidates:
    """Slots that might leave. slot [B, H, P] int64: those of lowest importance, lowest first (the last one repeats
    where there are fewer); live [B, H, P] bool: within what their own head has to look at; rank [B, H, C] int64: every
    slot's place by importance."""

    slot: Tensor
    live: Tensor
    rank: Tensor


def candidates(slots: Slots, importance: Tensor, target: Tensor, pool: int, count: int) -> Candidates:
    """The `pool` times `count` slots of lowest importance among `target` [B, H, C] bool."""
    import torch

    ascending = torch.where(target, importance, torch.inf).sort(dim=-1, stable=True).indices
    places = torch.clamp(torch.arange(pool * count, device=importance.device), max=importance.shape[-1] - 1)
    # Empty slots leave first; a head's pool follows its own need, whatever its neighbours in the batch need.
    own = count - (slots.votes == 0).sum(-1, keepdim=True)
    in_order = torch.arange(importance.shape[-1], device=importance.device).expand(ascending.shape)
    rank = torch.zeros_like(ascending).scatter(-1, ascending, in_order)
    return Candidates(ascending.index_select(-1, places), places < pool * own, rank)


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


def nearest(slots: Slots, leaving: Leaving, measure: Literal["cosine", "dot", "distance"]) -> tuple[Tensor, Tensor]:
    """The nearest target of every leaving slot and how near it is, each [B, H, V]: the cosine, the dot product, or
    minus the square of the distance (to an error of 1e-6 of the keys' squared norms); ``NO_TARGET`` where there is
    none. Of equals the first, which has the lowest position."""
    import torch

    keys = unit(slots.key) if measure == "cosine" else slots.key.float()
    arriving = gather_rows(keys, leaving.slot)
    near = arriving @ keys.transpose(-1, -2)  # [B, H, V, C]
    if measure == "distance":
        square = (keys * keys).sum(-1)
        near = 2.0 * near - square[:, :, None, :] - gather_rows(square, leaving.slot)[..., None]
    best, to = torch.where(leaving.target[:, :, None, :], near, NO_TARGET).max(dim=-1)
    return to, best
