"""Least-squares fits of the kept cache slots to reference queries (recent queries that a method stores).

After an eviction the values, or the votes (token counts) and the values, of the kept slots are changed. The stored
queries then get nearly the same attention outputs (and give nearly the same attention mass) as with all slots.

All steps of the fits are plain matrix products, because standard ONNX operators have no factorization. Native kernels
solve the same equations by Cholesky's method.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kvexport.methods.primitives.pairs import rotated
from kvexport.methods.slots import Evicted, Slots
from kvexport.schema.policy import Fit

if TYPE_CHECKING:
    from torch import Tensor

LOW = -1e30  # below every logit
MOST_SHARE = 34.5  # the largest logarithm of a slot's share of the mass: products of two shares stay finite


def fitted(fit: Fit, before: Slots, merged: Slots, evicted: Evicted) -> Slots:
    """Return the kept slots with values, or token counts (votes) and values, fitted to the stored recent queries.

    After the fit, attention of these queries over the kept slots gives nearly the output that attention over all slots
    of `before` gave. `before.extra` has the queries [B, H, W, D] and the number of tokens that each has seen. Slots
    that may not receive evicted slots, and KV heads without evictions, do not change.
    """
    import torch

    query, seen = before.extra
    kept = kept_slots(before, evicted)
    all_logits = logits(before, before.votes > 0, query, seen, fit.read_exponent)
    read = probabilities(all_logits)
    output = read @ before.value.float()
    if fit.fit == "votes_and_values":
        shares = read
        if merged is not before:
            shares = shares_of(logits(merged, kept, query, seen, fit.read_exponent), all_logits)
        merged = replace(merged, votes=fitted_votes(fit, before, merged, read, shares, kept, evicted))
    read = attention(merged, kept, query, seen, fit.read_exponent)
    value = fitted_values(read, merged.value, output, evicted.can_receive, fit.ridge, fit.change_max)
    changes = evicted.can_receive & evicted.occupied.any(-1, keepdim=True)
    value = torch.where(changes[..., None], value.to(merged.value.dtype), merged.value)
    return replace(merged, value=value, extra=(_turned(query, before, evicted), seen))


def kept_slots(slots: Slots, evicted: Evicted) -> Tensor:
    """Return a mask [B, H, C] of the slots that are occupied and not evicted."""
    import torch

    occupied = slots.votes > 0
    return occupied & ~torch.zeros_like(occupied).scatter(-1, evicted.index, evicted.occupied)


def _turned(query: Tensor, slots: Slots, evicted: Evicted) -> Tensor:
    """Return the stored queries [B, H, W, D] rotated (RoPE) to their positions after the merge.

    If keys are rotated by their index in the cache instead of the token's position, evictions lower the index of later
    keys, and queries are rotated back by as many positions.
    """
    if not slots.rotary.cache_positions:
        return query
    steps = -evicted.occupied.sum(-1, keepdim=True)
    return rotated(query, steps.expand(query.shape[:3]), slots.rotary)


def attended(fit: Fit, slots: Slots) -> Tensor:
    """Return for every slot the sum of the squared probabilities that recent queries give it; [B, H, C] float32.

    Probabilities of at most 1e-6 count as zero. A probability that underflows in only one backend then changes no
    eviction.
    """
    import torch

    query, seen = slots.extra
    read = attention(slots, slots.votes > 0, query, seen, fit.read_exponent)
    return torch.where(read > 1e-6, read * read, 0.0).sum(2)


def attention(slots: Slots, visible: Tensor, query: Tensor, seen: Tensor, alpha: float) -> Tensor:
    """Return the probabilities [B, H, W, C] of W recent queries over C slots; 0 for a query that sees none."""
    return probabilities(logits(slots, visible, query, seen, alpha))


def logits(slots: Slots, visible: Tensor, query: Tensor, seen: Tensor, alpha: float) -> Tensor:
    """Return the attention logits [B, H, W, C] of W recent queries over C slots; LOW for a slot that is not seen.

    Args:
        slots: The layer's cache.
        visible: [B, H, C] bool, the slots that queries may see.
        query: [B, H, W, D] float32, multiplied by the logits' scale.
        seen: [B, H, W] int32, the tokens that each query has seen, its own included; later ones are invisible to it.
        alpha: The factor of the bias ``alpha ln(votes)``, where votes is the number of tokens of a slot.
    """
    import torch

    sees = visible[:, :, None] & (slots.position[:, :, None] < seen[..., None])
    bias = torch.where(visible, alpha * torch.log(torch.where(visible, slots.votes, 1.0)), 0.0)
    return torch.where(sees, query @ slots.key.float().transpose(-1, -2) + bias[:, :, None], LOW)


def probabilities(logits: Tensor) -> Tensor:
    """Return the softmax of logits [..., C]; slots with the logit LOW have probability 0."""
    mass = _masses(logits, logits.amax(-1, keepdim=True))
    return mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)


def shares_of(slot_logits: Tensor, all_logits: Tensor) -> Tensor:
    """Return exp(logit) of each slot [..., C], divided by the sum of exp(logit) over the slots of `all_logits`.

    The logarithm of the result is at most MOST_SHARE. For a slot with the logit LOW (not seen) the result is 0.
    """
    import torch

    top = all_logits.amax(-1, keepdim=True)
    log_mass = top + torch.log(_masses(all_logits, top).sum(-1, keepdim=True).clamp(min=1e-30))
    return torch.where(slot_logits > LOW, torch.exp((slot_logits - log_mass).clamp(max=MOST_SHARE)), 0.0)


def _masses(logits: Tensor, top: Tensor) -> Tensor:
    import torch

    sees = logits > LOW
    return torch.where(sees, torch.exp(torch.where(sees, logits - top, 0.0)), 0.0)


def fitted_values(read: Tensor, value: Tensor, output: Tensor, free: Tensor, ridge: float, change_max: float) -> Tensor:
    """Return values [B, H, C, Dv] float32 of slots that give W recent queries the outputs Y.

    The result is ``V + X^T (X X^T + ridge I)^-1 (Y - X V)`` over the slots whose values may change, the dual form (W
    equations) of the ridge regression that starts from V.

    Args:
        read: [B, H, W, C], the attention probabilities X of the W queries over C slots.
        value: [B, H, C, Dv], the present values V.
        output: [B, H, W, Dv], the outputs Y to approximate.
        free: [B, H, C] bool, the slots whose values may change.
        ridge: The regularization, above 0.
        change_max: The change of a head's free values is at most this share of their norm.
    """
    import torch

    value = value.float()
    design = torch.where(free[:, :, None], read, 0.0)
    dual = inverse(design @ design.transpose(-1, -2), ridge) @ (output - read @ value)
    change = design.transpose(-1, -2) @ dual
    norm, largest = (
        (x * x).sum((-2, -1), keepdim=True).sqrt() for x in (change, torch.where(free[..., None], value, 0.0))
    )
    return value + change * (change_max * largest / norm.clamp(min=1e-30)).clamp(max=1.0)


def inverse(gram: Tensor, ridge: float) -> Tensor:
    """Return the inverse of ``A = gram + ridge I`` by Newton's iteration ``N <- N + N (I - A N)`` (Schulz 1933).

    `gram` [..., W, W] has the products of W vectors whose sums of squares are at most 1, so A's eigenvalues are between
    `ridge` and W + ridge, and the number of steps is known. Every step corrects the rounding errors of earlier ones:
    the float32 result is accurate to about the condition number times 6e-8.
    """
    import torch

    size = gram.shape[-1]
    place = torch.arange(size, device=gram.device)
    one = (place[:, None] == place).to(gram.dtype)
    matrix = gram + ridge * one
    largest = matrix.sum(-1).amax(-1)[..., None, None]  # the largest row sum bounds every eigenvalue
    result = (2.0 / (largest + ridge)) * one
    for _ in range(newton_steps(size, ridge)):
        result = result + result @ (one - matrix @ result)
    return result


def newton_steps(size: int, ridge: float) -> int:
    """Return the number of steps after which Newton's iteration inverts a [W, W] matrix (W = `size`) to 2^-24.

    The initial error is ``(k - 1) / (k + 1)`` for the condition number k, at most ``W / ridge + 1``. Each step squares
    the error.
    """
    condition = size / ridge + 1.0
    return math.ceil(math.log2(24.0 * math.log(2.0) / math.log((condition + 1.0) / (condition - 1.0))))


def fitted_votes(
    fit: Fit, slots: Slots, merged: Slots, read: Tensor, shares: Tensor, kept: Tensor, evicted: Evicted
) -> Tensor:
    """Return votes [B, H, C] with which the kept slots get the attention mass that all slots had before.

    Votes (the tokens a slot counts for) stay between ``exp(-bias_max)`` and ``exp(bias_max)``. Their sum is at most the
    sum of votes over the free and the evicted slots before the merge, because no slot stands for tokens that never
    existed. `fitted_mass` explains `read` and `shares`.
    """
    import torch

    free = evicted.can_receive
    votes = merged.votes * fitted_mass(read, shares, kept, free, fit.vote_steps)
    votes = votes.clamp(min=math.exp(-fit.bias_max), max=math.exp(fit.bias_max))
    bound = torch.where(kept & ~free, 0.0, slots.votes).sum(-1, keepdim=True)
    votes = votes * (bound / torch.where(free, votes, 0.0).sum(-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
    return torch.where(free & evicted.occupied.any(-1, keepdim=True), votes, merged.votes)


def fitted_mass(read: Tensor, shares: Tensor, kept: Tensor, free: Tensor, steps: int) -> Tensor:
    """Return factors [B, H, C] for the token counts of kept slots, so that they get the attention mass of all slots.

    The factors f solve the non-negative least-squares fit ``min |sum_j f_j P_ij - 1|`` over the queries i, where P_ij
    is the share of slot j in the mass of query i. The multiplicative updates (Lee and Seung 2001) start at 1 and stay
    positive without a bound.

    Args:
        read: [B, H, W, C], the probabilities of the W queries over all C slots before the merge.
        shares: [B, H, W, C], the mass of each merged slot as a share of the mass of all slots before the merge.
        kept: [B, H, C] bool, the kept slots.
        free: [B, H, C] bool, the slots whose factor may differ from 1.
        steps: The number of updates.
    """
    import torch

    design = torch.where(free[:, :, None], shares, 0.0)
    # The mass that the free slots have to hold: that of all slots except kept ones whose votes are fixed.
    mass = torch.where((kept & ~free)[:, :, None], 0.0, read).sum(-1)
    numerator = (mass[:, :, None] @ design)[:, :, 0]
    factor = torch.ones_like(numerator)
    for _ in range(steps):
        denominator = (design @ factor[..., None]).transpose(-1, -2) @ design
        counts = free & (numerator > 1e-20) & (denominator[:, :, 0] > 1e-20)
        factor = torch.where(counts, factor * numerator / torch.where(counts, denominator[:, :, 0], 1.0), factor)
    return factor
