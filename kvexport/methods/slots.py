"""The data that compression methods work on: a layer's cache slots, their statistics, and the evicted slots.

Dimensions are B sequences, H KV heads, C slots of a head, V evicted slots and D elements of a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Statistic:
    """One importance statistic, a measure of the attention that each cache slot has received.

    Attributes:
        kind: ``log_ema`` is the logarithm of the exponential moving average of exp(raw logit). ``probability`` is the
            decayed sum of attention probabilities. ``none`` is never updated.
        decay: The factor by which each query lowers the old average or sum. ``log_ema`` needs 0 < decay < 1.
        window: The number of last queries of a model call that count; 0 for all.
        recency_weight: The weight of the newest counted query, relative to 1 for the oldest and linear between them
            (KeepKV's first version and PyramidInfer); 1 weights all queries alike. For ``log_ema`` the recency weight
            changes the mean and not the sum of the weights. For ``probability`` it makes the sum larger.
    """

    kind: Literal["log_ema", "probability", "none"] = "none"
    decay: float = 1.0
    window: int = 0
    recency_weight: float = 1.0


@dataclass(frozen=True)
class Rotary:
    """A layer's rotary embedding.

    The first 2F dimensions of a key at position p are rotated, in F planes, by ``p * inverse_frequencies``. Plane f
    consists of the dimensions (f, f + F), or (2f, 2f + 1) if they are interleaved. F is 0 if nothing is rotated.

    Attributes:
        inverse_frequencies: The F inverse frequencies, in radians for each position.
        interleaved: Whether plane f consists of the dimensions (2f, 2f + 1).
        cache_positions: Whether p is the slot's place in the cache, which is the number of occupied slots of lower
            position, instead of the token's position. A merge then rotates kept keys to their new places.
    """

    inverse_frequencies: tuple[float, ...] = ()
    interleaved: bool = False
    cache_positions: bool = False


@dataclass(frozen=True)
class Slots:
    """A layer's KV cache in the form that methods read: slots in order of position, empty ones last.

    Attributes:
        key: [B, H, C, D] in the cache's type.
        value: [B, H, C, Dv] in the cache's type.
        votes: [B, H, C] float32, the number of tokens that a slot stands for; 0 for an empty slot.
        score: [B, H, K, C] float32, the K statistics of the attention that a slot has received.
        position: [B, H, C] int32.
        now: [B, H, 1] int32, the position of the latest token.
        rotary: The layer's rotary embedding, for methods that need it.
        extra: The tensors of `Method.extra_state`. Tensors with one row for each slot have the same order of slots.
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
    """The cache slots that a merge evicts, and the slots that they may merge into.

    Attributes:
        index: [B, H, V] int64, the V evicted slots of each KV head as indices into `Slots`.
        occupied: [B, H, V] bool. False if the slot was empty already.
        can_receive: [B, H, C] bool. True for kept slots that evicted ones may merge into: never sinks, and recent slots
            only if `Method.recent_receives` is true.
        unprotected: [B, H, C] bool. True for occupied slots that are neither sinks nor recent, whether evicted or not.
    """

    index: Tensor
    occupied: Tensor
    can_receive: Tensor
    unprotected: Tensor


@dataclass(frozen=True)
class NewTokens:
    """The new tokens that a call of the attention operator appends to the KV cache, for `Method.update`.

    Attributes:
        query: [B, Hq, T, D], the T queries of each of Hq query heads.
        key: [B, H, T, D].
        value: [B, H, T, Dv].
        position: [B, T] int64.
        real: [B, T] bool. False for padding.
        scale: The factor of the products of queries and keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    real: Tensor
    scale: float


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the slots' elements or vectors of x [B, H, C] or [B, H, C, D] at `index` [B, H, N]."""
    return x.gather(2, index if x.dim() == 3 else index[..., None].expand(*index.shape, x.shape[3]))


def gather_slots(slots: Slots, index: Tensor, extra_axes: tuple[int | None, ...] = ()) -> Slots:
    """Return the slots at `index` [B, H, N]. `extra_axes`: the dimension of slots in each extra tensor, or None."""
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
    """Return x [B, H, ..., C, ...] at the indices `index` [B, H, N] of dimension `axis`; x itself if `axis` is None."""
    if axis is None:
        return x
    shape = list(x.shape)
    shape[axis] = index.shape[-1]
    return x.gather(axis, along(index, axis, x.dim()).expand(shape))


def along(index: Tensor, axis: int, dims: int) -> Tensor:
    """Return `index` [B, H, N] reshaped to `dims` dimensions, N at dimension `axis` and 1 at all others after H."""
    ones = [1] * (dims - 3)
    return index.reshape(*index.shape[:2], *ones[: axis - 2], index.shape[2], *ones[axis - 2 :])


def ranks(x: Tensor) -> Tensor:
    """Return the rank of each element of x [B, H, N] in ascending order, int64; equal elements keep their order."""
    import torch

    order = x.sort(dim=-1, stable=True).indices
    return torch.zeros_like(order).scatter(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))


def corrected_log_ema(slots: Slots, k: int, decay: float) -> Tensor:
    """Return ln(S / (1 - a^n)), the bias-corrected moving average S of statistic k with the decay a; [B, H, C].

    n is the number of queries since the slot's token. n includes queries outside the statistic's window, because the
    queries inside stand for the whole call.
    """
    import torch

    seen = torch.clamp(slots.now - slots.position + 1, min=1).float()
    return slots.score[:, :, k] - torch.log1p(-torch.exp(seen * math.log(decay)))
