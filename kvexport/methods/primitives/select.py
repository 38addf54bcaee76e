"""Which slots are evicted: the importance of a slot, and the order that a policy makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvexport.methods.primitives.fit import attended
from kvexport.methods.primitives.pairs import pair_order
from kvexport.methods.primitives.sets import squared_distances
from kvexport.methods.slots import Slots, corrected_log_ema, gather_rows
from kvexport.schema.policy import MergePolicy

if TYPE_CHECKING:
    from torch import Tensor

LAST = 1e30  # above every error


def importance(policy: MergePolicy, slots: Slots, target: Tensor) -> Tensor:
    """[B, H, C] float32: the importance that `policy.select` names; `target` [B, H, C] bool as of
    `Method.keep_score`."""
    if policy.select == "position":
        return slots.position.float()
    if policy.select == "average":
        return corrected_log_ema(slots, 0, policy.select_decay)
    if policy.select == "pooled":
        return pooled(slots, target, policy.pooled // 2)
    if policy.select == "mean":
        return mean_per_observation(slots)
    if policy.select == "attended" and policy.fit is not None:
        return attended(policy.fit, slots)
    return slots.score[:, :, 0]


def mean_per_observation(slots: Slots) -> Tensor:
    """The first statistic's mean per observation, ``A / (now - position + 1)``; [B, H, C]."""
    import torch

    seen = torch.clamp(slots.now - slots.position + 1, min=1)
    return slots.score[:, :, 0] / seen.float()


def pooled(slots: Slots, target: Tensor, reach: int) -> Tensor:
    """``sum_{|o| <= reach} A[position + o]`` over unprotected slots, added up in order of position, so that slots with
    the same neighbours tie; [B, H, C]."""
    import torch

    observed = torch.where(target, slots.score[:, :, 0], 0.0)
    place = torch.arange(target.shape[-1], device=target.device)
    total = torch.zeros_like(observed)
    # Slots are in order of position: a neighbour within reach is no further away in slots.
    for offset in range(-reach, reach + 1):
        there = torch.clamp(torch.clamp(place + offset, min=0), max=target.shape[-1] - 1)
        near = (slots.position.index_select(-1, there) - slots.position).abs() <= reach
        total = total + torch.where((place + offset == there) & near, observed.index_select(-1, there), 0.0)
    return total


def keep_score(policy: MergePolicy, slots: Slots, target: Tensor, count: int) -> Tensor:
    """`Method.keep_score` of a policy: the importance, in the order that `policy.order` asks for."""
    import torch

    scores = importance(policy, slots, target)
    if policy.merge == "pair":
        return pair_order(scores, target, share=policy.share_pairs)
    value = torch.where(slots.votes > 1, 1e38, scores) if policy.merged_last else scores
    if policy.order == "lowest":
        return value
    pool = eviction_pool(slots, value, target, policy.eviction_pool, count)
    own = gather_rows(scores, pool.index)
    higher = target[:, :, None, :] & (scores[:, :, None, :] > own[..., None])
    if policy.order == "least_error":
        return _least_error_first(policy, slots, pool, own, higher)
    return _near_first(policy, slots, pool, higher)


def _near_first(policy: MergePolicy, slots: Slots, pool: EvictionPool, higher: Tensor) -> Tensor:
    """Ranks, so that no score can outweigh what comes first: slots of the pool with a near target, then the others,
    each by score."""
    import torch

    from kvexport.methods.primitives.sets import nearness

    near = torch.where(higher, nearness(slots, pool.index, policy.measure), -torch.inf).amax(-1)
    first = (near > policy.threshold) & pool.occupied
    lead = torch.zeros_like(pool.rank).scatter(-1, pool.index, torch.where(first, slots.votes.shape[-1], 0))
    return (pool.rank - lead).float()


def _least_error_first(policy: MergePolicy, slots: Slots, pool: EvictionPool, own: Tensor, higher: Tensor) -> Tensor:
    """The error of the cheapest merge of every slot of the pool, and beyond every error the ranks of the others."""
    import torch

    apart = squared_distances(slots.key, pool.index) * squared_distances(slots.value, pool.index)
    apart = torch.where(higher, apart, LAST).amin(-1)
    error = torch.clamp(own, min=0.0) ** policy.error_exponent * apart
    rank = LAST * (1.0 + pool.rank.float())
    merges = pool.occupied & (apart < LAST)
    return rank.scatter(-1, pool.index, torch.where(merges, error.clamp(max=0.1 * LAST), gather_rows(rank, pool.index)))


@dataclass(frozen=True)
class EvictionPool:
    """The slots among which evicted ones are chosen. index [B, H, P] int64: those of lowest importance, lowest first;
    all slots where these are fewer; occupied [B, H, P] bool: within what their own head has to look at; rank [B, H, C]
    int64: every slot's place by importance."""

    index: Tensor
    occupied: Tensor
    rank: Tensor


def eviction_pool(slots: Slots, scores: Tensor, target: Tensor, times: int, count: int) -> EvictionPool:
    """The `times` times `count` slots of lowest `scores` among `target` [B, H, C] bool."""
    import torch

    ascending = torch.where(target, scores, torch.inf).sort(dim=-1, stable=True).indices
    size = torch.sym_min(times * count, scores.shape[-1])  # type: ignore[no-untyped-call]
    places = torch.arange(size, device=scores.device)
    # Empty slots are evicted first; a head's pool follows its own need, whatever its neighbours in the batch need.
    needed = count - (slots.votes == 0).sum(-1, keepdim=True)
    in_order = torch.arange(scores.shape[-1], device=scores.device).expand(ascending.shape)
    rank = torch.zeros_like(ascending).scatter(-1, ascending, in_order)
    return EvictionPool(ascending.index_select(-1, places), places < times * needed, rank)
