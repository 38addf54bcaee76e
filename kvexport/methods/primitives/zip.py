"""KeepKV's merge rule (arXiv 2504.09936): means weighted by token count times exp(logit), and an error correction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvexport.methods.primitives.sets import MergeSets
from kvexport.methods.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor


def zipped(
    slots: Slots, sets: MergeSets, logit: Tensor, mode: str, key_factor_max: float = math.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the merged key and value [B, H, V, D] and token count [B, H, V] of every set by KeepKV's rule.

    The weight of a slot is ``w = p exp(logit)`` with its token count p (votes). The key is ``sum w k / sum w``, and the
    value likewise. With ``L = sum w logit / sum w``, the mode ``mean`` adds token counts up; ``vote`` stores the
    fractional count exp(ln(sum w) - L); ``key`` adds counts up and scales the key by ``(ln(sum w) - ln(sum p)) / L``
    (Eq. 7 of the paper), or does as ``vote`` if that factor is outside [1/x, x] for the bound x = `key_factor_max`.
    """
    import torch

    target_votes, evicted_votes = sets.pair(slots.votes)
    target, evicted = sets.pair(logit)
    top = sets.largest(target, evicted)
    # Logits are taken relative to the largest of the set. A set that no query has seen has logits of -1e30, whose
    # rounding error would exceed every vote.
    target, evicted = target - top, evicted - top
    target_weight = target_votes * torch.exp(target)
    evicted_weight = evicted_votes * torch.exp(torch.where(sets.merges, evicted, -torch.inf))
    key, value = (sets.mean(x, target_weight, evicted_weight) for x in (slots.key, slots.value))
    count = sets.sum(target_votes, evicted_votes)
    if mode == "mean":
        return key, value, count
    total = sets.sum(target_weight, evicted_weight)
    log_total = torch.log(total)
    mean_logit = sets.sum(target_weight * target, evicted_weight * evicted) / total
    fractional = torch.exp(log_total - mean_logit)
    if mode == "vote":
        return key, value, fractional
    factor = key_factor(log_total - torch.log(count) + top, mean_logit + top)
    limit = min(key_factor_max, torch.finfo(torch.float32).max)  # the pole is outside every limit
    usable = (factor >= 1.0 / limit) & (factor <= limit)
    return torch.where(usable[..., None], factor[..., None] * key, key), value, torch.where(usable, count, fractional)


def key_factor(log_mean: Tensor, mean_logit: Tensor) -> Tensor:
    """Return the factor ``ln m / L`` by which KeepKV scales a merged key (Eq. 7 of arXiv 2504.09936); [B, H, V].

    ln m is the logarithm of the mean of exp(logit), weighted by token counts, and L the mean of the logits by weight.
    The factor is infinite at the pole L = 0, and 1 if both are equal up to rounding, where L may be 0 and the ratio
    noise.
    """
    import torch

    ratio = log_mean / torch.where(mean_logit == 0.0, 1.0, mean_logit)
    ratio = torch.where(mean_logit == 0.0, torch.inf, ratio)
    agree = (log_mean - mean_logit).abs() <= 1e-6 * torch.clamp(mean_logit.abs(), min=1.0)
    return torch.where(agree, 1.0, ratio)
