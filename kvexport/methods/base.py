"""A compression method: which statistics it keeps, which slots are evicted, and what they merge into.

A method is one file in this folder with one subclass of `Method`; `kvexport.methods` finds it by itself. The two
operators (`kvexport.ops`) do the rest. Nothing here imports torch when it is imported: recipes are validated on
machines without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from kvexport.schema.policy import MergePolicy
from kvexport.schema.state import StateTensor

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
    nothing is rotated."""

    inverse_frequencies: tuple[float, ...] = ()
    interleaved: bool = False


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
    new tokens; position [B, T] int64; real [B, T] bool: False where a row is padding."""

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    real: Tensor


class Method(BaseModel):
    """Base of all methods. Fields of a subclass are its parameters: a recipe's `cache.parameters`, and attributes of
    the node."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    compresses: ClassVar[bool] = True  # False: nothing is evicted but what a sliding window has passed
    allocation: ClassVar[Literal["uniform", "cosine", "pyramid"]] = (
        "uniform"  # how layers share the budget unless the recipe says
    )
    recent_receives: ClassVar[bool] = False  # True: recent slots, which are never evicted, may be merged into
    rotary: ClassVar[bool] = False  # True: `Slots.rotary` is needed

    @property
    def vote_exponent(self) -> float:
        """alpha of the read bias ``alpha * ln(votes)``."""
        return 0.0

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The K statistics that VoteAttention keeps; the first selects, the last weighs."""
        return (Statistic(),)

    @property
    def extra_state(self) -> tuple[StateTensor, ...]:
        """State tensors that the method keeps beside the contract's five. Unless overridden, none. No native kernel
        has them: such a method runs from its functions."""
        return ()

    def update(self, extra: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
        """The tensors of `extra_state` after one call of VoteAttention; those of slots come with zeros where a slot was
        appended in this call. A sequence without real tokens must keep its own. Unless overridden, they stay as they
        are."""
        return extra

    def policy(self) -> MergePolicy | None:
        """The method's rule as data, which native kernels run; None where it is `keep_score` and `merge` of its own."""
        return None

    def keep_score(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """[B, H, C] float32: slots of the lowest keep score are evicted first, ties by the lowest position. `target`
        [B, H, C] bool marks used slots that are neither sinks nor recent; the value elsewhere does not matter. count:
        how many are evicted, at the most. Unless overridden, what the policy says."""
        from kvexport.methods.primitives.select import keep_score

        policy = self.policy()
        if policy is None:
            raise NotImplementedError(f"{self.name} has neither a policy nor a keep_score")
        return keep_score(policy, slots, target, count)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """The cache in which every kept slot has taken in what it should of the evicted ones. Unless overridden, what
        the policy says; without one they are dropped."""
        from kvexport.methods.primitives.merge import merge

        policy = self.policy()
        return slots if policy is None else merge(policy, self.statistics, slots, evicted)


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


def corrected_log_ema(slots: Slots, k: int, decay: float) -> Tensor:
    """ln(S / (1 - a^n)) of statistic k, n = now - position + 1 the queries that saw the slot, whether they counted or
    others of their call stood for them; [B, H, C]."""
    import torch

    seen = torch.clamp(slots.now - slots.position + 1, min=1).float()
    return slots.score[:, :, k] - torch.log1p(-torch.exp(seen * math.log(decay)))
