"""MergeCache: bring a cache that is over budget back to exactly `budget` slots, the way its method says.

This function is the operator's only meaning. Its ONNX function is traced from it (`kvexport.ops.onnx_function`) and
native kernels are held to it by `tests/conformance`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvexport.errors import UsageError
from kvexport.methods.base import Method
from kvexport.methods.primitives.pairs import rotated
from kvexport.methods.slots import Evicted, Rotary, Slots, gather_slots, ranks
from kvexport.ops.small_cache import dequantized, is_small, quantized, rotated_by_hadamard

LAST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class MergeCacheAttributes:
    """The attributes of a MergeCache node: `budget` slots are kept, the first `sinks` positions and the latest `recent`
    of them always; with a `sliding_window` (0 = none), slots that the window has passed are evicted first. rotary: the
    layer's, where the method or positions in the cache ask for it. Raises UsageError for positions in the cache with a
    sliding window."""

    method: Method
    budget: int
    sinks: int = 0
    recent: int = 0
    sliding_window: int = 0
    rotary: Rotary = field(default_factory=Rotary)

    def __post_init__(self) -> None:
        if self.rotary.cache_positions and self.sliding_window:
            raise UsageError(
                f"positions in the cache with a sliding window of {self.sliding_window}: it counts absolute positions",
                "a sliding_window of 0, or absolute positions",
            )


def merge_cache(
    key: Tensor,
    value: Tensor,
    votes: Tensor,
    score: Tensor,
    position: Tensor,
    *extra: Tensor,
    attributes: MergeCacheAttributes,
    rows: tuple[Tensor, Tensor, Tensor] | None = None,
    recent: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One layer's cache back within its budget; a cache within it stays as it lies.

    Args:
        key, value: [B, H, C, D], [B, H, C, Dv]; votes: [B, H, C] float32, 0 = empty; score: [B, H, K, C] float32;
        position: [B, H, C] int32. Used slots are a prefix, in any order. extra: the scales of keys and values, [B, H,
        C] float32 each, where the cache is small, and its keys or values int8, or uint8 with half the last dimension;
        then the method's `extra_state`.
        rows: three tensors whose lengths alone matter, given by the tracer, where they are symbolic: `budget` rows, the
        rows by which the fullest head is over it, one at least (see `rows_of`), and the rest of the capacity, `capacity
        - budget`.
        recent: [1] int32, given by the tracer, in place of the attribute.

    Returns:
        The state tensors in the same shapes and dtypes: at most `budget` used slots, a prefix, zeros after row
        `budget`. Of n slots that are kept, those below row n stay where they lie, a merged one where its target lay;
        the lowest hole among the first n rows takes the last kept slot, the next lowest hole the last but one, and so
        on.

    Raises UsageError where K is not the number of statistics that the method keeps.
    """
    if is_small(key):
        return _merge_small((key, value, votes, score, position, *extra), attributes, rows, recent)
    statistics = len(attributes.method.statistics)
    if score.shape[2] != statistics:
        found = f"the score has {score.shape[2]} statistics, {attributes.method.name} keeps {statistics}"
        raise UsageError(found, f"a score of [B, H, {statistics}, C]")
    axes = tuple(tensor.slot_axis for tensor in attributes.method.extra_state)
    kept_rows, evicted_rows, freed_rows = rows or rows_of(votes, attributes.budget)
    working = kept_rows.shape[0] + evicted_rows.shape[0]

    now = torch.where(votes > 0, position, -1).amax(-1, keepdim=True)  # [B, H, 1]
    if attributes.sliding_window:
        votes = torch.where(position > now - attributes.sliding_window, votes, 0.0)
    # Only the fullest head's slots are looked at: the rest of the capacity is empty everywhere.
    order = torch.where(votes > 0, position, LAST).sort(dim=-1, stable=True).indices[:, :, :working]
    slots = gather_slots(Slots(key, value, votes, score, position, now, attributes.rotary, extra), order, axes)
    used = slots.votes > 0
    held = torch.where(used, slots.position, LAST)
    if not attributes.method.compresses:
        kept = used
    else:
        sink, late = (
            slots.position < attributes.sinks,
            slots.position > now - (attributes.recent if recent is None else recent),
        )
        protected = used & (sink | late)
        target = used & ~protected
        keep_score = attributes.method.keep_score(slots, target, evicted_rows.shape[0])
        keep_score = torch.where(protected, torch.inf, torch.where(used, keep_score, -torch.inf))
        index = keep_score.sort(dim=-1, stable=True).indices[:, :, : evicted_rows.shape[0]]
        stays = torch.ones_like(used).scatter(-1, index, torch.zeros_like(index, dtype=torch.bool))
        receives = used & ~sink if attributes.method.recent_receives else target
        evicted = Evicted(index, used.gather(-1, index), receives & stays, target)
        slots = attributes.method.merge(slots, evicted)
        kept = used & stays
    row = torch.arange(order.shape[-1], device=votes.device).expand_as(order)
    lies = torch.zeros_like(kept).scatter(-1, order, kept)  # of every row of the cache: whether a kept slot lies there
    number = torch.zeros_like(order).scatter(-1, order, row)  # ... and which of `slots` lies there
    source = _without_holes(lies)[:, :, : kept_rows.shape[0]]
    result = gather_slots(slots, number.gather(-1, source), axes)
    result_votes = torch.where(row[:, :, : kept_rows.shape[0]] < kept.sum(-1, keepdim=True), result.votes, 0.0)
    if attributes.rotary.inverse_frequencies and attributes.rotary.cache_positions:
        result = replace(result, key=_turned(result, result_votes, held, attributes.rotary))

    def padded(x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = freed_rows.shape[0]
        return torch.cat([x, x.new_zeros(shape)], dim=dim)

    return (
        padded(result.key, 2),
        padded(result.value, 2),
        padded(result_votes, 2),
        padded(result.score, 3),
        padded(result.position, 2),
        *(x if axis is None else padded(x, axis) for x, axis in zip(result.extra, axes, strict=True)),
    )


def _merge_small(
    state: tuple[Tensor, ...],
    attributes: MergeCacheAttributes,
    rows: tuple[Tensor, Tensor, Tensor] | None,
    recent: Tensor | None,
) -> tuple[Tensor, ...]:
    """`merge_cache` of a small cache, as float32. Methods see both rotated by the Hadamard matrix, which changes
    no mean, product, cosine or distance; where keys are turned, or the method kept something of its own of queries and
    keys, they see keys as they are. A slot that is neither merged nor turned keeps its bits: `quantized` gives back
    what was dequantized."""
    key, value, votes, score, position, key_scale, value_scale, *extra = state
    as_is = attributes.rotary.inverse_frequencies or attributes.method.extra_state
    turn = rotated_by_hadamard if as_is else torch.Tensor.float
    wide = (turn(dequantized(key, key_scale)), dequantized(value, value_scale))
    merged = merge_cache(*wide, votes, score, position, *extra, attributes=attributes, rows=rows, recent=recent)
    key, key_scale = quantized(turn(merged[0]), key.dtype)
    value, value_scale = quantized(merged[1], value.dtype)
    return (key, value, *merged[2:5], key_scale, value_scale, *merged[5:])


def _without_holes(lies: Tensor) -> Tensor:
    """lies [B, H, W] bool: in which rows n kept slots lie. Of the first n rows the ones that their slots come from, of
    the others themselves; [B, H, W] int64."""
    row = torch.arange(lies.shape[-1], device=lies.device).expand_as(lies)
    count = lies.to(torch.int64).cumsum(-1)
    kept, before = count[:, :, -1:], count - lies.to(torch.int64)
    holes = row - before  # below this row
    listed = torch.zeros_like(row).scatter(-1, torch.where(lies, before, kept + holes), row)  # kept slots' rows first
    return torch.where(lies | (row >= kept), row, listed.gather(-1, torch.clamp(kept - 1 - holes, min=0)))


def _turned(result: Slots, votes: Tensor, held: Tensor, rotary: Rotary) -> Tensor:
    """Keys [B, H, N, D] turned from the places that they had among `held` [B, H, C] positions, in order and LAST where
    empty, to those that they have now, in any order. A merged slot had the place of its latest member."""
    before = held.shape[-1]
    position = torch.where(votes > 0, result.position, LAST)
    place = ranks(position)
    both = ranks(torch.cat([held, position], dim=-1))[:, :, before:]  # of equals the held one is first
    old = both - place - 1  # that rank counts those held up to the slot itself, and the results before it
    steps = torch.where(votes > 0, place - old, 0)
    turned = rotated(result.key.float(), steps, rotary).to(result.key.dtype)
    return torch.where((steps != 0)[..., None], turned, result.key)


def rows_of(votes: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """`rows` of `merge_cache` for these votes [B, H, C]."""
    capacity = votes.shape[2]
    kept = min(budget, capacity)
    # One row at least, of an empty slot where nothing is over: ONNX Runtime gives a reduction of no rows the wrong
    # shape.
    over = max(int((votes > 0).sum(-1).max()) - budget, min(capacity - kept, 1))
    return votes.new_zeros(kept), votes.new_zeros(over), votes.new_zeros(capacity - kept)
