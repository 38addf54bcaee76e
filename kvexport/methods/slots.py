"""A layer's cache as methods see it: its slots, the statistics kept of them, and the slots that are evicted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Statistic:
    """One importance statistic, kept per slot in ``score[:, :, k]``.

    kind: ``log_ema`` (logarithm of the exponential moving average of exp(raw logit)), ``probability`` (decayed sum of
        attention probabilities) or ``none`` (the row stays as it is).
    decay: ``a`` of the average, or ``d`` of the sum, per query; ``log_ema`` needs 0 < a < 1.
    window: only the last so many queries of a call count; 0 means all of them.
    recency_weight: the newest counted query weighs this much, the oldest 1, linearly between (KeepKV's first version
        and PyramidInfer; 1 = off). Of a ``log_ema`` it changes the mean, not the sum of the weights; a ``probability``
        sum it makes larger.
    """

    kind: Literal["log_ema", "probability", "none"] = "none"
    decay: float = 1.0
    window: int = 0
    recency_weight: float = 1.0


@dataclass(frozen=True)
class Rotary:
    """A layer's rotary embedding: the first 2F dimensions of a key at position p are rotated, in F planes, by ``p *
    inverse_frequencies``. Plane f holds dimensions (f, f + F), or (2f, 2f + 1) where they are interleaved. F is 0 where
    nothing is rotated. cache_positions: p is not the token's position but its slot's place in the cache, the number of
    used slots of lower position; a merge turns kept keys to their new places."""

    inverse_frequencies: tuple[float, ...] = ()
    interleaved: bool = False
    cache_positions: bool = False


@dataclass(frozen=True)
class Slots:
    """A layer's cache as a method sees it: slots in order of position, empty ones last.

    key [B, H, C, D], value [B, H, C, Dv], votes [B, H, C] float32 (0 = empty), score [B, H, K, C] float32,
    position [B, H, C] int32, now [B, H, 1] int32: the position of the latest token. rotary: the layer's, for methods
        that ask for it. extra: the tensors of `Method.extra_state`, those of slots in the same order.
    """

    key: Tensor
    value: Tensor
    votes: Tensor
    score: Tensor
    position: Tensor
    now: Tensor
    rotary: Rotary = Rotary()
    extra: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Evicted:
    """The slots that are evicted. index [B, H, V] int64: where they are in `Slots`; occupied [B, H, V] bool: False
    where a slot was empty anyway; can_receive [B, H, C] bool: kept slots that evicted ones may merge into (no sinks,
    and recent ones only with `Method.recent_receives`); unprotected [B, H, C] bool: used slots that are neither sinks
    nor recent, evicted or not."""

    index: Tensor
    occupied: Tensor
    can_receive: Tensor
    unprotected: Tensor


@dataclass(frozen=True)
class Call:
    """One call of VoteAttention, for `Method.update`. query [B, Hq, T, D], key [B, H, T, D], value [B, H, T, Dv] of the
    new tokens; position [B, T] int64; real [B, T] bool: False where a row is padding; scale: of the products of queries
    and keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    real: Tensor
    scale: float


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, H, C] or [B, H, C, D] at index [B, H, N]. Where an index is repeated for all of a row, as here, the
    ONNX function copies the row as a whole."""
    return x.gather(2, index if x.dim() == 3 else index[..., None].expand(*index.shape, x.shape[3]))


def gather_slots(slots: Slots, index: Tensor, extra_axes: tuple[int | None, ...] = ()) -> Slots:
    """`slots` at `index` [B, H, N]. extra_axes: of every extra tensor the dimension that counts slots, None where it
    has none and stays as it is."""
    return replace(
        slots,
        key=gather_rows(slots.key, index),
        value=gather_rows(slots.value, index),
        votes=gather_rows(slots.votes, index),
        score=slots.score.gather(3, index[:, :, None].expand(-1, -1, slots.score.shape[2], -1)),
        position=gather_rows(slots.position, index),
        extra=tuple(gather_along(x, axis, index) for x, axis in zip(slots.extra, extra_axes, strict=True)),
    )


def gather_along(x: Tensor, axis: int | None, index: Tensor) -> Tensor:
    """x [B, H, ..., C, ...] at index [B, H, N] of dimension `axis`; x where that is None."""
    if axis is None:
        return x
    shape = list(x.shape)
    shape[axis] = index.shape[-1]
    return x.gather(axis, along(index, axis, x.dim()).expand(shape))


def along(index: Tensor, axis: int, dims: int) -> Tensor:
    """index [B, H, N] with N as dimension `axis` of `dims`, the others after H being 1."""
    ones = [1] * (dims - 3)
    return index.reshape(*index.shape[:2], *ones[: axis - 2], index.shape[2], *ones[axis - 2 :])


def ranks(x: Tensor) -> Tensor:
    """Where each element of x [B, H, N] stands in ascending order, of equals the first one first; int64."""
    import torch

    order = x.sort(dim=-1, stable=True).indices
    return torch.zeros_like(order).scatter(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))


def corrected_log_ema(slots: Slots, k: int, decay: float) -> Tensor:
    """ln(S / (1 - a^n)) of statistic k, n = now - position + 1 the queries that saw the slot, whether they counted or
    others of their call stood for them; [B, H, C]."""
    import torch

    seen = torch.clamp(slots.now - slots.position + 1, min=1).float()
    return slots.score[:, :, k] - torch.log1p(-torch.exp(seen * math.log(decay)))
