"""What a compression method is: which statistic it keeps, which slots leave, and where they go.

A method is one file in this folder with one subclass of `Method`; `kvexport.methods` finds it by itself. The two
operators (`kvexport.ops`) do the rest. Nothing here imports torch when it is imported: recipes are validated on
machines without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

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
    """A layer's rotary embedding: the first 2F dimensions of a key at position p are turned, in F planes, by ``p *
    inverse_frequencies``. Plane f holds dimensions (f, f + F), or (2f, 2f + 1) where they are interleaved. F is 0 where
    nothing is turned."""

    inverse_frequencies: tuple[float, ...] = ()
    interleaved: bool = False


@dataclass(frozen=True)
class Slots:
    """A layer's cache as a method sees it: slots in order of position, empty ones last.

    key [B, H, C, D], value [B, H, C, Dv], votes [B, H, C] float32 (0 = empty), score [B, H, K, C] float32,
    position [B, H, C] int32, now [B, H, 1] int32: the position of the latest token. rotary: the layer's, for methods
        that ask for it.
    """

    key: Tensor
    value: Tensor
    votes: Tensor
    score: Tensor
    position: Tensor
    now: Tensor
    rotary: Rotary = Rotary()


@dataclass(frozen=True)
class Leaving:
    """The slots that leave. slot [B, H, V] int64 indices into `Slots`; live [B, H, V] bool, False where the slot was
    empty anyway;
    target [B, H, C] bool: slots that stay and may receive others (no sinks, and recent ones only with
    `Method.recent_receives`)."""

    slot: Tensor
    live: Tensor
    target: Tensor


class Method(BaseModel):
    """Base of all methods. Fields of a subclass are its parameters: a recipe's `cache.parameters`, and attributes of
    the node."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    compresses: ClassVar[bool] = True  # False: nothing leaves but what a sliding window has passed
    allocation: ClassVar[Literal["uniform", "cosine", "pyramid"]] = (
        "uniform"  # how layers share the budget unless the recipe says
    )
    recent_receives: ClassVar[bool] = False  # True: recent slots, which never leave, may be merged into
    rotary: ClassVar[bool] = False  # True: `Slots.rotary` is needed

    @property
    def vote_exponent(self) -> float:
        """alpha of the read bias ``alpha * ln(votes)``."""
        return 0.0

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The K statistics that VoteAttention keeps; the first selects, the last weighs."""
        return (Statistic(),)

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """[B, H, C] float32: slots of lowest priority leave first, ties by the lowest position. `target` [B, H, C] bool
        marks used slots that are neither sinks nor recent; the value elsewhere does not matter. count: how many leave,
        at the most."""
        raise NotImplementedError

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """The cache in which every slot that stays has taken in what it should of the leaving ones. Default: they are
        dropped."""
        return slots


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, H, C] or [B, H, C, D] at index [B, H, N]. Where an index is repeated for all of a row, as here, the
    ONNX function copies the row as a whole."""
    return x.gather(2, index if x.dim() == 3 else index[..., None].expand(*index.shape, x.shape[3]))


def gather_slots(slots: Slots, index: Tensor) -> Slots:
    """`slots` at `index` [B, H, N]."""
    return replace(
        slots,
        key=gather_rows(slots.key, index),
        value=gather_rows(slots.value, index),
        votes=gather_rows(slots.votes, index),
        score=slots.score.gather(3, index[:, :, None].expand(-1, -1, slots.score.shape[2], -1)),
        position=gather_rows(slots.position, index),
    )


def corrected_log_ema(slots: Slots, k: int, decay: float) -> Tensor:
    """ln(S / (1 - a^n)) of statistic k, n = now - position + 1 the queries that saw the slot, whether they counted or
    others of their call stood for them; [B, H, C]."""
    import torch

    seen = torch.clamp(slots.now - slots.position + 1, min=1).float()
    return slots.score[:, :, k] - torch.log1p(-torch.exp(seen * math.log(decay)))
