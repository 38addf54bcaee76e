"""Merges of neighbouring cache slots in pairs, both keys rotated to one position (AsymKV, KVSlimmer).

The slots that are neither sinks nor recent form, in order of position, the pairs (1, 2), (3, 4), ..., so no slot is in
two pairs. The least attended pairs merge: the older slot is evicted into the younger. Values become means weighted by
votes (the tokens that a slot stands for), and votes add up. If merging pairs does not free enough slots, the least
attended slots are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvexport.methods.primitives.sets import MergeSets, merge_sets
from kvexport.methods.slots import Evicted, Rotary, Slots
from kvexport.schema.policy import MergePolicy

if TYPE_CHECKING:
    from torch import Tensor


def pair_order(scores: Tensor, unprotected: Tensor, *, share: bool) -> Tensor:
    """Return keep scores [B, H, C]: the older slots of pairs of neighbours are evicted first, then all others.

    A pair is ranked by the sum of both slots' importances (`scores`), any other slot by its own importance. With
    `share`, all heads evict the same pairs, ranked by the sum over heads: a pair has the same slot indices in all
    heads. These indices mean the same token positions as long as every merge was shared.
    """
    import torch

    scores = torch.where(unprotected, scores, 0.0)
    capacity = unprotected.shape[-1]
    place = torch.arange(capacity, device=unprotected.device)
    after = torch.clamp(place + 1, max=capacity - 1)
    paired = _older(unprotected)
    pair = scores + scores.index_select(-1, after)
    if share:
        pair = torch.where(paired, pair, 0.0).sum(1, keepdim=True).expand_as(pair)
    first = torch.where(paired, pair, torch.inf).sort(dim=-1, stable=True).indices
    then = scores.sort(dim=-1, stable=True).indices
    by_pair, by_slot = (torch.zeros_like(order).scatter(-1, order, place.expand_as(order)) for order in (first, then))
    return torch.where(paired, by_pair, by_slot + capacity).float()


def merge_pairs(policy: MergePolicy, slots: Slots, evicted: Evicted) -> tuple[MergeSets, Tensor, Tensor, Tensor]:
    """Merge V pairs of slots; return the pairs, merged keys and values [B, H, V, D] and token counts [B, H, V].

    The older key is rotated to the position of the younger one. The key is the mean of both by `key_weights`, the value
    ``sum n v / sum n`` and the token count ``sum n``.
    """
    import torch

    targets = torch.clamp(evicted.index + 1, max=evicted.can_receive.shape[-1] - 1)
    merges = _older(evicted.unprotected).gather(-1, evicted.index) & evicted.can_receive.gather(-1, targets)
    sets = merge_sets(evicted, targets, merges)
    younger, older = sets.pair(slots.key)
    place = torch.arange(slots.votes.shape[-1], device=targets.device).expand_as(slots.votes)
    frame = place if slots.rotary.cache_positions else slots.position  # the positions that keys are rotated by
    older = rotated(older, frame.gather(-1, targets) - frame.gather(-1, evicted.index), slots.rotary)
    younger_weight, older_weight = key_weights(policy, slots, sets)
    # Both weights are zero in a cache that no query has attended to. The keys then count alike.
    total = younger_weight + older_weight
    share = torch.where(total > 0, younger_weight / torch.where(total > 0, total, 1.0), 0.5)[..., None]
    younger_votes, older_votes = sets.pair(slots.votes)
    value = sets.mean(slots.value, younger_votes, older_votes)
    return sets, share * younger + (1.0 - share) * older, value, sets.sum(younger_votes, older_votes)


def key_weights(policy: MergePolicy, slots: Slots, sets: MergeSets) -> tuple[Tensor, Tensor]:
    """Return the weights [B, H, V] with which the younger and the older key of a pair enter the merged key.

    With the setting `weigh=score` they are the slots' attention statistics. With `weigh=hessian` they follow KVSlimmer:
    how much each key, moved towards the other, changes the attention output, to second order.
    """
    import torch

    if policy.weigh == "score":
        return sets.pair(slots.score[:, :, -1])
    mass = torch.where(slots.votes > 0, slots.score[:, :, -1], 0.0)
    share = mass / torch.clamp(mass.sum(-1, keepdim=True), min=1e-30)
    output = share[:, :, None, :] @ torch.where(slots.votes[..., None] > 0, slots.value.float(), 0.0)
    a1, a2 = sets.pair(share)
    residual1, residual2 = (x - output for x in sets.pair(slots.value))
    c11 = (a1 * (1.0 - 2.0 * a1)).abs() * residual1.norm(dim=-1)
    c22 = (a2 * (1.0 - 2.0 * a2)).abs() * residual2.norm(dim=-1)
    c12 = a1 * a2 * (residual1 + residual2).norm(dim=-1)
    younger, older = torch.clamp(c11 - c12, min=0.0), torch.clamp(c22 - c12, min=0.0)
    degenerate = younger + older <= policy.tau * (c11 + c22)
    return torch.where(degenerate, a1, younger), torch.where(degenerate, a2, older)


def _older(unprotected: Tensor) -> Tensor:
    """Return a mask [B, H, C] of the first (older) slot of every pair of neighbouring unprotected slots.

    Unprotected slots are contiguous: sinks come before them, recent and empty slots after.
    """
    import torch

    slots = unprotected.shape[-1]
    place = torch.arange(slots, device=unprotected.device)
    paired = unprotected & unprotected.index_select(-1, torch.clamp(place + 1, max=slots - 1)) & (place < slots - 1)
    number = unprotected.to(torch.int64).cumsum(-1)
    return paired & (number % 2 == 1)


def rotated(key: Tensor, steps: Tensor, rotary: Rotary) -> Tensor:
    """Return keys [B, H, V, D] float32 rotated by RoPE, as if their tokens were `steps` [B, H, V] positions later."""
    import torch

    planes = len(rotary.inverse_frequencies)
    if not planes:
        return key
    angle = steps[..., None].float() * torch.tensor(rotary.inverse_frequencies, dtype=torch.float32, device=key.device)
    return turned(key, torch.cos(angle), torch.sin(angle), interleaved=rotary.interleaved)


def turned(key: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool) -> Tensor:
    """Return keys [..., D] rotated in F planes, which are their first 2F dimensions, by cosines and sines [..., F]."""
    import torch

    planes = cosine.shape[-1]
    plain = key[..., : 2 * planes]
    if interleaved:
        x, y = plain[..., ::2], plain[..., 1::2]
        result = torch.stack([x * cosine - y * sine, y * cosine + x * sine], dim=-1).flatten(-2)
    else:
        x, y = plain[..., :planes], plain[..., planes:]
        result = torch.cat([x * cosine - y * sine, y * cosine + x * sine], dim=-1)
    return torch.cat([result, key[..., 2 * planes :]], dim=-1)
