"""The operator VoteAttention: append new tokens to the KV cache, attend with a bias by votes, and update the scores.

The votes of a cache slot are the number of tokens that the slot stands for. The scores of a slot are statistics of the
attention that the slot has received. The function `vote_attention` defines the operator for KV heads of one capacity,
and `kvexport.ops.layer_state` for the heads of a layer, which may differ. The ONNX function for heads of one capacity
is traced from `vote_attention` (`kvexport.ops.onnx_function`), and `tests/conformance` compares native kernels with it.
`read_attention` is the attention of a layer that has no cache of its own, and of images whose tokens see later ones. An
exported graph contains `read_attention` as standard ONNX operators.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexport.methods.base import Method
from kvexport.methods.slots import NewTokens, Statistic, along
from kvexport.ops.quantized_cache import dequantized, is_quantized, quantized, rotated_by_hadamard

# The logarithm of zero, and the bias of an invisible slot. It is finite, so that the difference of two of them is not
# NaN. Adding a logit to it does not change it in float32.
LOG_ZERO = -1e30


@dataclass(frozen=True)
class VoteAttentionAttributes:
    """The attributes of a VoteAttention node.

    Attributes:
        scale: The factor of the products of queries and keys.
        vote_exponent: The factor alpha of the bias ``alpha * ln(votes)``, where votes is the number of tokens that a
            cache slot stands for.
        statistics: The K statistics of received attention that are kept for every slot.
        sliding_window: The number of latest positions that are visible; 0 for all.
        softcap: The bound of logits; 0 for none.
        method: The compression method, if it has extra state (`Method.extra_state`).
        value_prefix: The size of a value, if values are the first elements of their keys and are not stored; otherwise
            0.
    """

    scale: float
    vote_exponent: float = 0.0
    statistics: tuple[Statistic, ...] = (Statistic(),)
    sliding_window: int = 0
    softcap: float = 0.0
    method: Method | None = None
    value_prefix: int = 0


def vote_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    query_length: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    past_votes: Tensor,
    past_score: Tensor,
    past_position: Tensor,
    sink_logits: Tensor | None = None,
    *past_extra: Tensor,
    attributes: VoteAttentionAttributes,
) -> tuple[Tensor, ...]:
    """Append new tokens to the KV cache of heads with equal capacity; return the attention output and the new cache.

    Products, softmax and scores are computed in float32. The occupied slots are the first ones of a head. The number of
    occupied slots plus query_length must be at most the capacity C, so the caller merges before the cache is full.

    Args:
        query: [B, Hq, T, D] rotated queries. Row t is padding if t >= query_length.
        key: [B, H, T, D], the keys of the same tokens. Hq is a multiple of H.
        value: [B, H, T, Dv], the values of the same tokens.
        position: [B, T] int64 absolute positions, consecutive within a sequence.
        query_length: [B, 1] int64, the number of real tokens in this call. 0 leaves the sequence's state bit-identical.
        past_key: [B, H, C, D] in the cache's type.
        past_value: [B, H, C, Dv] in the cache's type; [B, H, C, 0] with `value_prefix`.
        past_votes: [B, H, C] float32; 0 for an empty slot.
        past_score: [B, H, K, C] float32, the K statistics of each slot.
        past_position: [B, H, C] int32.
        sink_logits: [Hq], one learned logit for each head that takes probability and has no value (gpt-oss), or None.
        *past_extra: For a quantized cache the scales of keys and values, [B, H, C] float32 each; then the tensors of
            the method's `extra_state`. Keys and values of a quantized cache are int8, or uint8 with half the last
            dimension.
        attributes: The attributes of the node.

    Returns:
        The output [B, Hq, T, Dv] in the query's dtype, 0 in padding rows, and the present state tensors in the order
        and shapes of the past ones.
    """
    batch, tokens = position.shape
    query_heads = query.shape[1]
    heads, capacity = past_key.shape[1], past_key.shape[2]
    lengths = query_length.to(torch.int32)  # [B, 1]
    step = torch.arange(tokens, dtype=torch.int32, device=query.device)
    real = step < lengths  # [B, T]

    # Append. A padding row writes its slot's own contents back, so that an in-place scatter changes no other slot. The
    # slots of one call are distinct because T <= C.
    used = (past_votes > 0).to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32)  # [B, H, 1]
    slot = ((used + step) % capacity).to(torch.int64)  # [B, H, T]
    rows = torch.arange(batch, device=query.device)[:, None, None].expand(batch, heads, tokens)
    columns = torch.arange(heads, device=query.device)[None, :, None].expand(batch, heads, tokens)
    index = (rows, columns, slot)
    is_new = real[:, None, :, None]
    turn = rotated_by_hadamard if is_quantized(past_key) else torch.Tensor.float
    present_key, keys, *key_scale = _appended(past_key, key, index, is_new, past_extra[:1])
    if attributes.value_prefix:
        present_value, values, value_scale = past_value, keys[..., : attributes.value_prefix], []
    else:
        present_value, values, *value_scale = _appended(past_value, value, index, is_new, past_extra[1:2])
    age = torch.arange(capacity, dtype=torch.int32, device=query.device) - used  # [B, H, C]; 0 is the first new slot
    occupied = age < lengths[:, None]
    fresh = occupied & (age >= 0)
    present_votes = torch.where(fresh, 1.0, past_votes)
    present_position = torch.where(fresh, position[:, None, :1].to(torch.int32) + age, past_position)

    # Attend.
    visible, bias = _visible(position, occupied, present_position, present_votes, attributes)
    logits, probability = _probability(turn(query.float()), keys, bias, sink_logits, attributes)
    output = turn((probability @ values[:, :, None]).reshape(batch, query_heads, tokens, value.shape[3]))
    output = torch.where(is_new, output, 0.0).to(query.dtype)

    # Score.
    updated = []
    for k, statistic in enumerate(attributes.statistics):
        past = past_score[:, :, k]
        if statistic.kind == "none":
            updated.append(past)
            continue
        n, log_weight = _log_weights(lengths, step, statistic)
        if statistic.kind == "log_ema":
            score = _log_ema(logits, visible, past, fresh, lengths, log_weight, statistic)
        else:
            score = _probability_sum(probability, past, fresh, n, log_weight, statistic)
        updated.append(torch.where(occupied, score, past))
    scales = (*key_scale, *value_scale)
    state = (present_key, present_value, present_votes, torch.stack(updated, dim=2), present_position, *scales)
    new = NewTokens(query, key, value, position, real, attributes.scale)
    return (output, *state, *_extra(attributes.method, past_extra[len(scales) :], fresh, new))


def read_attention(
    query: Tensor,
    position: Tensor,
    query_length: Tensor,
    state: tuple[Tensor, ...],
    sink_logits: Tensor | None = None,
    *,
    attributes: VoteAttentionAttributes,
    last: Tensor | None = None,
) -> Tensor:
    """Return the output [B, Hq, T, Dv] of queries that read a KV cache but change no statistic, 0 for padding tokens.

    The new tokens are already in the cache `state`. `last` [B, T] is the position of the last token that each query
    sees; None for the query's own position. `vote_attention` explains the other arguments.
    """
    key, value, votes, _, slot_position, *scales = state
    if attributes.value_prefix:
        value = key[..., : attributes.value_prefix]
    small = is_quantized(key)
    turn = rotated_by_hadamard if small else torch.Tensor.float
    keys, values = (
        (dequantized(x, s) for x, s in zip((key, value), scales, strict=False))
        if small
        else (key.float(), value.float())
    )
    batch, tokens = position.shape
    real = torch.arange(tokens, dtype=torch.int32, device=query.device) < query_length.to(torch.int32)
    _, bias = _visible(position, votes > 0, slot_position, votes, attributes, last)
    _, probability = _probability(turn(query.float()), keys, bias, sink_logits, attributes)
    output = turn((probability @ values[:, :, None]).reshape(batch, query.shape[1], tokens, values.shape[3]))
    return torch.where(real[:, None, :, None], output, 0.0).to(query.dtype)


def _visible(
    position: Tensor,
    occupied: Tensor,
    slot_position: Tensor,
    votes: Tensor,
    attributes: VoteAttentionAttributes,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which cache slots each query sees, [B, H, T, C] bool, and the bias of each slot by its token count."""
    now = position.to(torch.int32)[:, None, :, None]  # [B, 1, T, 1]
    slot_position = slot_position[:, :, None, :]
    until = now if last is None else last.to(torch.int32)[:, None, :, None]
    visible = occupied[:, :, None, :] & (slot_position <= until)
    if attributes.sliding_window:
        visible = visible & (slot_position > now - attributes.sliding_window)
    if attributes.vote_exponent:
        bias = attributes.vote_exponent * torch.log(votes)
        return visible, torch.where(visible, bias[:, :, None, :], LOG_ZERO)
    return visible, torch.where(visible, 0.0, LOG_ZERO)


def _probability(
    query: Tensor, keys: Tensor, bias: Tensor, sink_logits: Tensor | None, attributes: VoteAttentionAttributes
) -> tuple[Tensor, Tensor]:
    """Return attention logits without the bias ln(votes), and attention probabilities; [B, H, Hq / H, T, C] float32."""
    batch, query_heads, tokens, head_size = query.shape
    heads = keys.shape[1]
    group = query_heads // heads
    grouped = (query * attributes.scale).reshape(batch, heads, group, tokens, head_size)
    # The group's dimension is inserted before the transpose: runtimes fuse a transpose only into a product that
    # follows it directly.
    logits = grouped @ keys[:, :, None].transpose(-1, -2)
    if attributes.softcap:
        logits = torch.tanh(logits / attributes.softcap) * attributes.softcap
    biased = logits + bias[:, :, None]
    if sink_logits is None:
        return logits, torch.softmax(biased, dim=-1)
    column = sink_logits.float().reshape(1, heads, group, 1, 1).expand(batch, heads, group, tokens, 1)
    return logits, torch.softmax(torch.cat([biased, column], dim=-1), dim=-1)[..., :-1]


def _appended(
    past: Tensor, rows: Tensor, index: tuple[Tensor, ...], is_new: Tensor, past_scale: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Write new keys or values [B, H, T, D] into the cache at `index`; return the cache, stored and in float32.

    A quantized cache also returns its scales. `is_new` [B, 1, T, 1] is false for padding.
    """
    if not is_quantized(past):
        present = past.index_put(index, torch.where(is_new, rows, past[index]))
        return present, present.float()
    numbers, scale = quantized(rotated_by_hadamard(rows.float()), past.dtype)
    # In float32, because ONNX Runtime has no Where of int8.
    numbers = torch.where(is_new, numbers.float(), past[index].float()).to(past.dtype)
    present = past.index_put(index, numbers)
    present_scale = past_scale[0].index_put(index, torch.where(is_new[..., 0], scale, past_scale[0][index]))
    return present, dequantized(present, present_scale), present_scale


def _extra(method: Method | None, past: tuple[Tensor, ...], fresh: Tensor, new: NewTokens) -> tuple[Tensor, ...]:
    if method is None:
        return past
    emptied = []
    for tensor, x in zip(method.extra_state, past, strict=True):
        axis = tensor.slot_axis
        emptied.append(x if axis is None else torch.where(along(fresh, axis + 1, x.dim()), torch.zeros_like(x), x))
    return method.update(tuple(emptied), new)


def _log_weights(lengths: Tensor, step: Tensor, statistic: Statistic) -> tuple[Tensor, Tensor]:
    """Return the number n [B, 1] of queries that a statistic counts, and the log weight [B, T] of each query.

    Of the n counted queries, query i has the weight ``decay^(n-1-i)`` times its recency weight. Padding and queries
    outside the statistic's window have the log weight LOG_ZERO.
    """
    n = lengths if statistic.window == 0 else torch.clamp(lengths, max=statistic.window)
    back = lengths - 1 - step  # 0 is the newest real row
    log_weight = back.float() * math.log(statistic.decay)
    if statistic.recency_weight != 1.0:
        share = 1.0 - back.float() / torch.clamp(n - 1, min=1).float()
        log_weight = log_weight + torch.log1p((statistic.recency_weight - 1.0) * torch.clamp(share, min=0.0))
    return n.float(), torch.where((back >= 0) & (back < n), log_weight, LOG_ZERO)


def _log_ema(
    logits: Tensor,
    visible: Tensor,
    past: Tensor,
    fresh: Tensor,
    lengths: Tensor,
    log_weight: Tensor,
    statistic: Statistic,
) -> Tensor:
    """Return the updated log of a slot's moving average of exp(logit) over the queries of a model call; [B, H, C].

    The result is ``ln(a^n S + (1 - a) sum_i a^(n-1-i) mean_g s_i)`` over the n queries. S is the past average, a the
    decay, s_i is exp(logit) of query i, and mean_g averages over the query heads of a KV head. With a window or a
    recency weight, all queries of the call that see the slot count with the weighted mean of the counted queries.
    """
    batch, heads, group, _, capacity = logits.shape
    rate = math.log(statistic.decay)
    share = log_weight + (math.log(1.0 - statistic.decay) - math.log(group))
    weighted = torch.where(visible, share[:, None, :, None], LOG_ZERO)
    if statistic.window or statistic.recency_weight != 1.0:
        weighted = weighted + _standing(visible, lengths, log_weight, rate)
    term = logits + weighted[:, :, None]
    start = torch.where(fresh, LOG_ZERO, past + lengths.float()[:, :, None] * rate)
    stacked = torch.cat([start[:, :, None], term.reshape(batch, heads, -1, capacity)], dim=2)
    top = stacked.amax(dim=2, keepdim=True)
    return (top + torch.log(torch.exp(stacked - top).sum(dim=2, keepdim=True)))[:, :, 0]


def _standing(visible: Tensor, lengths: Tensor, log_weight: Tensor, rate: float) -> Tensor:
    """Return the log of the weight of a call's counted queries, which stand for all n queries; [B, H, 1, C].

    A moving average with decay a gives query i of n the weight ``a^(n-1-i)``. A method with an observation window
    computes the average from the last queries alone, so their weights are scaled until they sum to those of all queries
    that see the slot. This function returns the log of that scale.
    """
    batch, heads, tokens, _ = visible.shape
    seen = visible.float()
    back = lengths - 1 - torch.arange(tokens, dtype=torch.int32, device=visible.device)
    plain = torch.where(back >= 0, torch.exp(back.float() * rate), 0.0)
    whole, counted = (
        w[:, None, None, :].expand(batch, heads, 1, tokens) @ seen for w in (plain, torch.exp(log_weight))
    )
    return torch.log(torch.clamp(whole, min=1e-30)) - torch.log(torch.clamp(counted, min=1e-30))


def _probability_sum(
    probability: Tensor, past: Tensor, fresh: Tensor, n: Tensor, log_weight: Tensor, statistic: Statistic
) -> Tensor:
    """Return the updated decayed sum of the attention probabilities that each slot received; [B, H, C].

    The result is ``d^n A + sum_i d^(n-1-i) mean_g p_i`` over the n counted queries. A is the past sum, d the decay, p_i
    the probability that query i gives the slot, and mean_g averages over the query heads of a KV head.
    """
    batch, heads, group, tokens, capacity = probability.shape
    weight = (
        (torch.exp(log_weight) / group)[:, None, None, :]
        .expand(batch, heads, group, tokens)
        .reshape(batch, heads, 1, group * tokens)
    )
    seen = (weight @ probability.reshape(batch, heads, group * tokens, capacity))[:, :, 0]
    return torch.where(fresh, 0.0, past * torch.exp(n[:, :, None] * math.log(statistic.decay))) + seen
