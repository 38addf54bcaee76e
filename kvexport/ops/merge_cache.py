"""The operator MergeCache: it evicts slots of a KV cache by a method's rule, until the cache is within its budget.

In a layer with a sliding window evicted slots are dropped, whatever the method. A merged slot would still hold content
of tokens that have left the window. Heads that attend to a few tokens with small values would lose these tokens by
merges.

The function `merge_cache` defines the operator for KV heads of one capacity and budget. `kvexport.ops.layer_state`
defines it for the heads of a layer, which may differ. The ONNX function for equal heads is traced from `merge_cache`
(`kvexport.ops.onnx_function`), and `tests/conformance` compares native kernels with it.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvexport.errors import UsageError
from kvexport.methods.base import Method
from kvexport.methods.primitives import merge as merge_rule
from kvexport.methods.primitives import select
from kvexport.methods.primitives.pairs import rotated
from kvexport.methods.slots import Evicted, Rotary, Slots, gather_slots, ranks
from kvexport.ops.quantized_cache import dequantized, is_quantized, quantized, rotated_by_hadamard
from kvexport.schema.policy import MergePolicy

LAST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class MergeCacheAttributes:
    """The attributes of a MergeCache node for one of its KV heads, or for heads of one budget.

    Attributes:
        method: The method that chooses evicted slots and merges them.
        budget: The number of slots that are kept.
        sinks: The number of first positions that are never evicted.
        recent: The number of latest positions that are never evicted.
        sliding_window: The layer's sliding window in positions; 0 for none. Slots that the window has passed are
            evicted first, and evicted slots are dropped.
        rotary: The layer's rotary embedding, if the method needs it, or if keys are rotated by their places in the
            cache.
        value_prefix: The size of a value, if values are the first elements of their keys and are not stored; otherwise
            0.

    Raises:
        UsageError: If keys are rotated by their places in the cache and the layer has a sliding window, or if values
            are a part of their keys and the method merges them with other weights.
    """

    method: Method
    budget: int
    sinks: int = 0
    recent: int = 0
    sliding_window: int = 0
    rotary: Rotary = field(default_factory=Rotary)
    value_prefix: int = 0

    def __post_init__(self) -> None:
        apart = self.rotary.inverse_frequencies or not self.method.merges_values_as_keys
        if self.value_prefix and apart:
            raise UsageError(
                f"value_prefix is {self.value_prefix}, but {self.method.name} merges values with other weights than "
                "keys, or rotates keys",
                "store values as tensors of their own: value_prefix = 0",
            )
        if self.rotary.cache_positions and self.sliding_window:
            raise UsageError(
                f"cache_positions is set, but the sliding window of {self.sliding_window} counts absolute positions",
                "set sliding_window to 0, or use absolute positions",
            )

    @property
    def policy(self) -> MergePolicy | None:
        """The method's eviction and merge rule as data; None if the method is PyTorch code instead.

        In a layer with a sliding window the rule drops evicted slots.
        """
        policy = self.method.policy()
        if policy is None or not self.sliding_window:
            return policy
        return replace(policy, merge="drop", order="lowest")

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return the keep score of every slot: the slots of lowest score are evicted first."""
        policy = self.policy if self.sliding_window else None
        if policy is None:
            return self.method.keep_score(slots, unprotected, count)
        return select.keep_score(policy, slots, unprotected, count)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Return the slots after a merge; a layer with a sliding window drops evicted slots instead."""
        if not self.sliding_window:
            return self.method.merge(slots, evicted)
        policy = self.policy
        return slots if policy is None else merge_rule.merge(policy, self.method.statistics, slots, evicted)


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
    """Return the KV cache of heads with at most `budget` occupied slots each; a cache within its budget is unchanged.

    The heads have one capacity. The occupied slots are the first ones of a head, in any order of positions.

    Args:
        key: [B, H, C, D] in the cache's type.
        value: [B, H, C, Dv] in the cache's type; [B, H, C, 0] with `value_prefix`.
        votes: [B, H, C] float32, the tokens that a slot stands for; 0 for an empty slot.
        score: [B, H, K, C] float32, the K statistics of each slot.
        position: [B, H, C] int32.
        extra: For a quantized cache the scales of keys and values, [B, H, C] float32 each; then the tensors of
            the method's `extra_state`. Keys and values of a quantized cache are int8, or uint8 with half the last
            dimension.
        attributes: The attributes of the node.
        rows: Three tensors of which only the lengths are read. The tracer passes them, because it needs symbolic
            lengths: `budget`; the slots by which the fullest head is over the budget, at least one (see `rows_of`); and
            `capacity - budget`.
        recent: [1] int32, which the tracer passes to replace the attribute.

    Returns:
        The state tensors in the same shapes and dtypes, with zeros from row `budget` on. The occupied slots are the
        first ones of a head. If n slots are kept, kept slots below row n stay in their row, and a merged slot is in its
        target's row. If evicted slots leave holes among the first n rows, the last kept slot moves into the lowest
        hole, the last but one into the next hole, and so on.

    Raises:
        UsageError: If K is not the number of statistics that the method keeps.
    """
    if is_quantized(key):
        return _merge_small((key, value, votes, score, position, *extra), attributes, rows, recent)
    statistics = len(attributes.method.statistics)
    if score.shape[2] != statistics:
        raise UsageError(
            f"the score has {score.shape[2]} statistics, but {attributes.method.name} keeps {statistics}",
            f"pass a score of [B, H, {statistics}, C]",
        )
    own = attributes.method.extra_state
    axes = tuple(None if tensor.slot_axis is None else tensor.slot_axis + 1 for tensor in own)
    kept_rows, evicted_rows, freed_rows = rows or rows_of(votes, attributes.budget)
    working = kept_rows.shape[0] + evicted_rows.shape[0]

    now = torch.where(votes > 0, position, -1).amax(-1, keepdim=True)  # [B, H, 1]
    if attributes.sliding_window:
        votes = torch.where(position > now - attributes.sliding_window, votes, 0.0)
    # As many slots as the fullest head occupies are gathered: the rest of the capacity is empty in every head.
    order = torch.where(votes > 0, position, LAST).sort(dim=-1, stable=True).indices[:, :, :working]
    values = key[..., : attributes.value_prefix] if attributes.value_prefix else value
    slots = gather_slots(Slots(key, values, votes, score, position, now, attributes.rotary, extra), order, axes)
    used = slots.votes > 0
    positions_before = torch.where(used, slots.position, LAST)
    # A cache whose capacity is its budget has no slot over the budget. Methods expect room for one evicted slot.
    never_over = rows is None and evicted_rows.shape[0] == 0
    if never_over or not attributes.method.compresses:
        kept = used
    else:
        sink, late = (
            slots.position < attributes.sinks,
            slots.position > now - (attributes.recent if recent is None else recent),
        )
        protected = used & (sink | late)
        unprotected = used & ~protected
        keep_score = attributes.keep_score(slots, unprotected, evicted_rows.shape[0])
        keep_score = torch.where(protected, torch.inf, torch.where(used, keep_score, -torch.inf))
        index = keep_score.sort(dim=-1, stable=True).indices[:, :, : evicted_rows.shape[0]]
        stays = torch.ones_like(used).scatter(-1, index, torch.zeros_like(index, dtype=torch.bool))
        receives = used & ~sink if attributes.method.recent_receives else unprotected
        evicted = Evicted(index, used.gather(-1, index), receives & stays, unprotected)
        slots = attributes.merge(slots, evicted)
        kept = used & stays
    row = torch.arange(order.shape[-1], device=votes.device).expand_as(order)
    # For every row of the cache: whether it contains a kept slot, and the index of that slot in `slots`.
    is_kept = torch.zeros_like(kept).scatter(-1, order, kept)
    number = torch.zeros_like(order).scatter(-1, order, row)
    source = _without_holes(is_kept)[:, :, : kept_rows.shape[0]]
    result = gather_slots(slots, number.gather(-1, source), axes)
    result_votes = torch.where(row[:, :, : kept_rows.shape[0]] < kept.sum(-1, keepdim=True), result.votes, 0.0)
    if attributes.rotary.inverse_frequencies and attributes.rotary.cache_positions:
        result = replace(result, key=_turned(result, result_votes, positions_before, attributes.rotary))

    def padded(x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = freed_rows.shape[0]
        return torch.cat([x, x.new_zeros(shape)], dim=dim)

    return (
        padded(result.key, 2),
        value if attributes.value_prefix else padded(result.value, 2),
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
    """Return the result of `merge_cache` for a cache of 8- or 4-bit keys and values, computed in float32.

    Methods get keys and values rotated by the Hadamard matrix, which preserves means, products, cosines and distances.
    Methods get unrotated keys if the merge rotates keys to other positions, or if the method stores state that it
    computed from queries and keys. A slot that is neither merged nor rotated keeps its stored bits, because rounding a
    dequantized key or value again (`quantized`) gives the same bits.
    """
    key, value, votes, score, position, key_scale, value_scale, *extra = state
    plain_keys = attributes.rotary.inverse_frequencies or attributes.method.extra_state
    turn = rotated_by_hadamard if plain_keys else torch.Tensor.float
    wide = (turn(dequantized(key, key_scale)), dequantized(value, value_scale))
    merged = merge_cache(*wide, votes, score, position, *extra, attributes=attributes, rows=rows, recent=recent)
    key, key_scale = quantized(turn(merged[0]), key.dtype)
    value, value_scale = quantized(merged[1], value.dtype)
    return (key, value, *merged[2:5], key_scale, value_scale, *merged[5:])


def _without_holes(is_kept: Tensor) -> Tensor:
    """Return, for each of W places of slots, the place whose slot moves there, so that no gaps are left; [B, H, W].

    The n kept slots (`is_kept`) end in the first n places. A later place keeps its slot.
    """
    row = torch.arange(is_kept.shape[-1], device=is_kept.device).expand_as(is_kept)
    count = is_kept.to(torch.int64).cumsum(-1)
    kept, before = count[:, :, -1:], count - is_kept.to(torch.int64)
    holes = row - before  # the number of holes below this row
    kept_first = torch.zeros_like(row).scatter(-1, torch.where(is_kept, before, kept + holes), row)
    return torch.where(is_kept | (row >= kept), row, kept_first.gather(-1, torch.clamp(kept - 1 - holes, min=0)))


def _turned(result: Slots, votes: Tensor, before: Tensor, rotary: Rotary) -> Tensor:
    """Return keys [B, H, N, D] rotated (RoPE) from their old place in the cache to their place after a merge.

    The place of a key is the number of occupied slots of lower position. A merged slot had the place of the latest slot
    merged into it. `before` has the positions before the merge in ascending order; LAST for empty slots.
    """
    position = torch.where(votes > 0, result.position, LAST)
    place = ranks(position)
    # Among equal positions the one before the merge ranks first. The joint rank counts the earlier slots up to the
    # slot itself, and the results before it.
    joint = ranks(torch.cat([before, position], dim=-1))[:, :, before.shape[-1] :]
    old_place = joint - place - 1
    steps = torch.where(votes > 0, place - old_place, 0)
    turned = rotated(result.key.float(), steps, rotary).to(result.key.dtype)
    return torch.where((steps != 0)[..., None], turned, result.key)


def rows_of(votes: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors whose lengths tell `merge_cache` how many slots are kept, evicted and freed.

    The lengths are the budget, the number of slots by which the fullest KV head exceeds the budget, and the capacity
    minus the budget.
    """
    capacity = votes.shape[2]
    kept = min(budget, capacity)
    # At least one row, because ONNX Runtime gives a reduction over no rows the wrong shape. If no head is over its
    # budget, this row is an empty slot.
    over = max(int((votes > 0).sum(-1).max()) - budget, min(capacity - kept, 1))
    return votes.new_zeros(kept), votes.new_zeros(over), votes.new_zeros(capacity - kept)
