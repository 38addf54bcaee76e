"""Neighbouring slots merge in pairs, in one rotary frame (AsymKV, KVSlimmer); values are means and votes add up.

Unprotected slots in order of position form pairs, (1, 2), (3, 4), ..., so that none is in two. The least attended pairs
merge: the older slot is evicted into the younger. Beyond what pairs can free, the least attended slots are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvexport.methods.primitives.sets import MergeSets, merge_sets
from kvexport.methods.slots import Evicted, Rotary, Slots
from kvexport.schema.policy import MergePolicy

if TYPE_CHECKING:
    from torch import Tensor


def pair_order(scores: Tensor, target: Tensor, *, share: bool) -> Tensor:
    """Older slots of pairs by the pair's importance, then all others by their own; [B, H, C] float32. share: all heads
    take the same pairs, by the sum of their importances (slots at the same place of the order, which hold the same
    positions as long as every merge was shared)."""
    import torch

    scores = torch.where(target, scores, 0.0)
    slots_in_all = target.shape[-1]
    place = torch.arange(slots_in_all, device=target.device)
    after = torch.clamp(place + 1, max=slots_in_all - 1)
    paired = _older(target)
    pair = scores + scores.index_select(-1, after)
    if share:
        pair = torch.where(paired, pair, 0.0).sum(1, keepdim=True).expand_as(pair)
    first = torch.where(paired, pair, torch.inf).sort(dim=-1, stable=True).indices
    then = scores.sort(dim=-1, stable=True).indices
    by_pair, alone = (torch.zeros_like(order).scatter(-1, order, place.expand_as(order)) for order in (first, then))
    return torch.where(paired, by_pair, alone + slots_in_all).float()


def merge_pairs(policy: MergePolicy, slots: Slots, evicted: Evicted) -> tuple[MergeSets, Tensor, Tensor, Tensor]:
    """The pairs that merge, their keys and values [B, H, V, D] and votes [B, H, V]: ``k`` by `key_weights` of the
    younger key and the older one rotated to its position, ``v = sum n v / sum n``, ``n = sum n``."""
    import torch

    to = torch.clamp(evicted.index + 1, max=evicted.can_receive.shape[-1] - 1)
    merges = _older(evicted.unprotected).gather(-1, evicted.index) & evicted.can_receive.gather(-1, to)
    sets = merge_sets(evicted, to, merges)
    younger, older = sets.pair(slots.key)
    place = torch.arange(slots.votes.shape[-1], device=to.device).expand_as(slots.votes)
    frame = place if slots.rotary.cache_positions else slots.position  # what a key is rotated by
    older = rotated(older, frame.gather(-1, to) - frame.gather(-1, evicted.index), slots.rotary)
    weight, weight_v = key_weights(policy, slots, sets)
    # Equal weights where both are zero, as in a cache that nothing has attended to.
    total = weight + weight_v
    share = torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), 0.5)[..., None]
    votes, votes_v = sets.pair(slots.votes)
    value = sets.mean(slots.value, votes, votes_v)
    return sets, share * younger + (1.0 - share) * older, value, sets.sum(votes, votes_v)


def key_weights(policy: MergePolicy, slots: Slots, sets: MergeSets) -> tuple[Tensor, Tensor]:
    """Nonnegative weights [B, H, V] of the younger key (the target's) and the older one: the last statistic, or
    KVSlimmer's brackets where `policy.weigh` is the Hessian."""
    import torch

    if policy.weigh == "score":
        return sets.pair(slots.score[:, :, -1])
    mass = torch.where(slots.votes > 0, slots.score[:, :, -1], 0.0)
    share = mass / torch.clamp(mass.sum(-1, keepdim=True), min=1e-30)
    output = share[:, :, None, :] @ torch.where(slots.votes[..., None] > 0, slots.value.float(), 0.0)
    a, a_v = sets.pair(share)
    residual, residual_v = (x - output for x in sets.pair(slots.value))
    c11 = (a * (1.0 - 2.0 * a)).abs() * residual.norm(dim=-1)
    c22 = (a_v * (1.0 - 2.0 * a_v)).abs() * residual_v.norm(dim=-1)
    c12 = a * a_v * (residual + residual_v).norm(dim=-1)
    younger, older = torch.clamp(c11 - c12, min=0.0), torch.clamp(c22 - c12, min=0.0)
    degenerate = younger + older <= policy.tau * (c11 + c22)
    return torch.where(degenerate, a, younger), torch.where(degenerate, a_v, older)


def _older(free: Tensor) -> Tensor:
    """The first slot of every pair of unprotected ones; [B, H, C] bool. These lie together: sinks before them, recent
    and empty after."""
    import torch

    slots = free.shape[-1]
    place = torch.arange(slots, device=free.device)
    paired = free & free.index_select(-1, torch.clamp(place + 1, max=slots - 1)) & (place < slots - 1)
    number = free.to(torch.int64).cumsum(-1)
    return paired & (number % 2 == 1)


def rotated(key: Tensor, steps: Tensor, rotary: Rotary) -> Tensor:
    """Keys [B, H, V, D], in float32, rotated by `steps` [B, H, V] positions: what they would have been so much
    later."""
    import torch

    planes = len(rotary.inverse_frequencies)
    if not planes:
        return key
    angle = steps[..., None].float() * torch.tensor(rotary.inverse_frequencies, dtype=torch.float32, device=key.device)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    plain = key[..., : 2 * planes]
    if rotary.interleaved:
        x, y = plain[..., ::2], plain[..., 1::2]
        result = torch.stack([x * cosine - y * sine, y * cosine + x * sine], dim=-1).flatten(-2)
    else:
        x, y = plain[..., :planes], plain[..., planes:]
        result = torch.cat([x * cosine - y * sine, y * cosine + x * sine], dim=-1)
    return torch.cat([result, key[..., 2 * planes :]], dim=-1)
