"""The merge rules of a `MergePolicy`: how evicted cache slots change the kept ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kvexport.methods.primitives.fit import fitted
from kvexport.methods.primitives.pairs import merge_pairs
from kvexport.methods.primitives.select import importance, mean_per_observation
from kvexport.methods.primitives.sets import MergeSets, merge_sets, nearest
from kvexport.methods.primitives.zip import zipped
from kvexport.methods.slots import Evicted, Slots, Statistic, corrected_log_ema
from kvexport.schema.policy import MergePolicy

if TYPE_CHECKING:
    from torch import Tensor


def merge(policy: MergePolicy, statistics: tuple[Statistic, ...], slots: Slots, evicted: Evicted) -> Slots:
    """Merge evicted slots into kept slots as `policy` says, and return the slots.

    If the policy has a fit, token counts or values of the kept slots then change so that recent queries get nearly the
    attention output that they had before the merge.
    """
    merged = _merged(policy, statistics, slots, evicted)
    return merged if policy.fit is None else fitted(policy.fit, slots, merged, evicted)


def _merged(policy: MergePolicy, statistics: tuple[Statistic, ...], slots: Slots, evicted: Evicted) -> Slots:
    if policy.merge == "drop":
        return slots
    if policy.merge == "pair":
        sets, key, value, votes = merge_pairs(policy, slots, evicted)
    else:
        if policy.merge == "running_mean":
            evicted = replace(evicted, can_receive=residual_slots(policy, slots, evicted))
        targets, near = nearest(slots, evicted, policy.measure)
        sets = merge_sets(evicted, targets, evicted.occupied & (near > policy.threshold))
        if policy.merge == "zip":
            logit = corrected_log_ema(slots, -1, policy.weigh_decay)
            key, value, votes = zipped(slots, sets, logit, policy.zip, policy.key_factor_max)
        else:
            target_votes, evicted_votes = sets.pair(slots.votes)
            key, value = (sets.mean(x, target_votes, evicted_votes) for x in (slots.key, slots.value))
            votes = sets.sum(target_votes, evicted_votes)
    if policy.votes_max < math.inf:
        votes = votes.clamp(max=policy.votes_max)
    score = sets.scores(slots, statistics)
    if policy.mean_adds:
        score = _with_means_added(slots, sets, score)
    return sets.write(slots, key, value, votes, score)


def _with_means_added(slots: Slots, sets: MergeSets, score: Tensor) -> Tensor:
    """Return merged statistics [B, H, V, K] whose first is the sum of the slots' mean probabilities per query.

    The sum is multiplied by the number of queries since the merged slot's latest token, so that it is a sum over
    queries again.
    """
    import torch

    mean = sets.sum(*sets.pair(mean_per_observation(slots)))
    first = mean * (slots.now - sets.latest(slots) + 1).float()
    return torch.cat([first[..., None], score[..., 1:]], dim=-1)


def residual_slots(policy: MergePolicy, slots: Slots, evicted: Evicted) -> Tensor:
    """Return a mask [B, H, C] of the residual slots, into which evicted slots merge as a running mean.

    Of the slots into which evicted slots may merge, the fraction `policy.residual` (at least one slot) is residual:
    first the slots that have received a merge before, then the slots of lowest importance.
    """
    import torch

    receives = evicted.can_receive
    count = torch.clamp((policy.residual * receives.sum(-1, keepdim=True)).floor(), min=1.0)
    scores = torch.where(slots.votes > 1, -1e38, importance(policy, slots, evicted.unprotected))
    order = torch.where(receives, scores, torch.inf).sort(dim=-1, stable=True).indices
    places = torch.arange(receives.shape[-1], device=receives.device).expand_as(order)
    return receives & (torch.zeros_like(order).scatter(-1, order, places) < count)
