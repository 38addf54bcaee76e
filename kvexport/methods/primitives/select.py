"""The selection of evicted cache slots: the importance of each slot, and the eviction order of a merge policy."""

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


def importance(policy: MergePolicy, slots: Slots, unprotected: Tensor) -> Tensor:
    """Return the importance [B, H, C] float32 of every slot, by the rule that `policy.select` names."""
    if policy.select == "position":
        return slots.position.float()
    if policy.select == "average":
        return corrected_log_ema(slots, 0, policy.select_decay)
    if policy.select == "pooled":
        return pooled(slots, unprotected, policy.pooled // 2)
    if policy.select == "mean":
        return mean_per_observation(slots)
    if policy.select == "attended" and policy.fit is not None:
        return attended(policy.fit, slots)
    return slots.score[:, :, 0]


def mean_per_observation(slots: Slots) -> Tensor:
    """Return each slot's first attention statistic, divided by the number of queries that saw the slot; [B, H, C]."""
    import torch

    seen = torch.clamp(slots.now - slots.position + 1, min=1)
    return slots.score[:, :, 0] / seen.float()


def pooled(slots: Slots, unprotected: Tensor, reach: int) -> Tensor:
    """Return each slot's attention summed over positions at a distance of at most `reach`; [B, H, C].

    Only slots that are neither sinks nor recent count. The terms are added in order of position, so that slots with the
    same neighbours have equal sums.
    """
    import torch

    observed = torch.where(unprotected, slots.score[:, :, 0], 0.0)
    place = torch.arange(unprotected.shape[-1], device=unprotected.device)
    total = torch.zeros_like(observed)
    # Slots are in order of position, so a neighbour within `reach` positions is within `reach` slots.
    for offset in range(-reach, reach + 1):
        there = torch.clamp(torch.clamp(place + offset, min=0), max=unprotected.shape[-1] - 1)
        near = (slots.position.index_select(-1, there) - slots.position).abs() <= reach
        total = total + torch.where((place + offset == there) & near, observed.index_select(-1, there), 0.0)
    return total


def keep_score(policy: MergePolicy, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
    """Return a score for each slot, lowest evicted first: by importance, similarity to another slot, or merge error."""
    import torch

    scores = importance(policy, slots, unprotected)
    if policy.merge == "pair":
        return pair_order(scores, unprotected, share=policy.share_pairs)
    value = torch.where(slots.votes > 1, 1e38, scores) if policy.merged_last else scores
    if policy.order == "lowest":
        return value
    pool = eviction_pool(slots, value, unprotected, policy.eviction_pool, count)
    pool_scores = gather_rows(scores, pool.index)
    higher = unprotected[:, :, None, :] & (scores[:, :, None, :] > pool_scores[..., None])
    if policy.order == "least_error":
        return _least_error_first(policy, slots, pool, pool_scores, higher)
    return _near_first(policy, slots, pool, higher)


def _near_first(policy: MergePolicy, slots: Slots, pool: EvictionPool, higher: Tensor) -> Tensor:
    """Return keep scores, lowest for slots of `pool` that have a similar slot to merge into, then by importance.

    Scores are ranks, so that a slot without a similar slot never comes first because of its importance.
    """
    import torch

    from kvexport.methods.primitives.sets import nearness

    near = torch.where(higher, nearness(slots, pool.index, policy.measure), -torch.inf).amax(-1)
    first = (near > policy.threshold) & pool.occupied
    lead = torch.zeros_like(pool.rank).scatter(-1, pool.index, torch.where(first, slots.votes.shape[-1], 0))
    return (pool.rank - lead).float()


def _least_error_first(
    policy: MergePolicy, slots: Slots, pool: EvictionPool, pool_scores: Tensor, higher: Tensor
) -> Tensor:
    """Return keep scores: for slots of the pool the error of their cheapest merge, and larger ranks for all others."""
    import torch

    distance = squared_distances(slots.key, pool.index) * squared_distances(slots.value, pool.index)
    distance = torch.where(higher, distance, LAST).amin(-1)
    error = torch.clamp(pool_scores, min=0.0) ** policy.error_exponent * distance
    rank = LAST * (1.0 + pool.rank.float())
    merges = pool.occupied & (distance < LAST)
    return rank.scatter(-1, pool.index, torch.where(merges, error.clamp(max=0.1 * LAST), gather_rows(rank, pool.index)))


@dataclass(frozen=True)
class EvictionPool:
    """The P cache slots of lowest importance in each KV head, from which evicted slots are chosen.

    Attributes:
        index: [B, H, P] int64, the slots of the pool, lowest importance first. P is the number of slots in the largest
            pool, at most the capacity.
        occupied: [B, H, P] bool. True for the first slots of `index`, which are the pool of the head: a head that
            evicts fewer slots has a smaller pool.
        rank: [B, H, C] int64, the place of every slot of the cache in the order of importance, 0 the lowest.
    """

    index: Tensor
    occupied: Tensor
    rank: Tensor


def eviction_pool(slots: Slots, scores: Tensor, unprotected: Tensor, times: int, count: int) -> EvictionPool:
    """Return the pool of candidates for eviction: the `times` times `count` slots of lowest importance `scores`."""
    import torch

    ascending = torch.where(unprotected, scores, torch.inf).sort(dim=-1, stable=True).indices
    size = torch.sym_min(times * count, scores.shape[-1])  # type: ignore[no-untyped-call]
    places = torch.arange(size, device=scores.device)
    # Empty slots are evicted first. The pool of a head depends on its own need alone, so that a sequence does not
    # depend on its neighbours in the batch.
    needed = count - (slots.votes == 0).sum(-1, keepdim=True)
    in_order = torch.arange(scores.shape[-1], device=scores.device).expand(ascending.shape)
    rank = torch.zeros_like(ascending).scatter(-1, ascending, in_order)
    return EvictionPool(ascending.index_select(-1, places), places < times * needed, rank)
