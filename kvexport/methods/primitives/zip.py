"""KeepKV's rule of merging (arXiv 2504.09936): the mean by votes times exp(logit), and what absorbs its error."""

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
    """Every set's key, value [B, H, V, D] and votes [B, H, V] by KeepKV's rule: ``w = p exp(logit)``, ``k = sum w k /
    sum w``, likewise
    v. logit [B, H, C]: ln of the score that weighs. mode: ``mean`` adds up votes; ``vote`` stores ``ln p = ln(sum w) -
    L``; ``key`` scales the key by ``(ln(sum w) - ln(sum p)) / L`` (Eq. 7), or is ``vote`` where that factor is outside
    [1/x, x], x `key_factor_max`; with ``L = sum w logit / sum w``."""
    import torch

    votes, votes_v = sets.pair(slots.votes)
    target, evicted = sets.pair(logit)
    top = sets.largest(target, evicted)
    # Relative to the largest: a set that no query has seen has logits of -1e30, whose rounding would drown every
    # vote.
    target, evicted = target - top, evicted - top
    weight, weight_v = votes * torch.exp(target), votes_v * torch.exp(torch.where(sets.merges, evicted, -torch.inf))
    key, value = (sets.mean(x, weight, weight_v) for x in (slots.key, slots.value))
    count = sets.sum(votes, votes_v)
    if mode == "mean":
        return key, value, count
    total = sets.sum(weight, weight_v)
    log_total = torch.log(total)
    mean_logit = sets.sum(weight * target, weight_v * evicted) / total
    fractional = torch.exp(log_total - mean_logit)
    if mode == "vote":
        return key, value, fractional
    factor = key_factor(log_total - torch.log(count) + top, mean_logit + top)
    limit = min(key_factor_max, torch.finfo(torch.float32).max)  # the pole is outside every limit
    usable = (factor >= 1.0 / limit) & (factor <= limit)
    return torch.where(usable[..., None], factor[..., None] * key, key), value, torch.where(usable, count, fractional)


def key_factor(log_mean: Tensor, mean_logit: Tensor) -> Tensor:
    """``ln m / L`` of Eq. 7; infinite at the pole, and 1 where both agree to rounding, for there L may be 0 and the
    ratio noise."""
    import torch

    ratio = log_mean / torch.where(mean_logit == 0.0, 1.0, mean_logit)
    ratio = torch.where(mean_logit == 0.0, torch.inf, ratio)
    agree = (log_mean - mean_logit).abs() <= 1e-6 * torch.clamp(mean_logit.abs(), min=1.0)
    return torch.where(agree, 1.0, ratio)
