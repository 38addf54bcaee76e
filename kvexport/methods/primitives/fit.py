"""Least squares of what reference queries read: the values, and the votes, with which the slots that are kept give the
outputs, and hold the mass, that all slots together had.

Everything is plain products of matrices, because standard ONNX operators have no factorization; native kernels solve
the same equations by Cholesky's.
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
MOST_SHARE = 34.5  # the logarithm of the most that a slot holds of the mass of all: products of two stay finite


def fitted(fit: Fit, before: Slots, merged: Slots, evicted: Evicted) -> Slots:
    """`merged` with such values, or votes and values, that the reference queries read from the slots that are kept what
    they read from all of `before`. Slots that cannot receive and heads of which nothing is evicted keep their bits."""
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
    """The used slots that are not evicted; [B, H, C] bool."""
    import torch

    held = slots.votes > 0
    return held & ~torch.zeros_like(held).scatter(-1, evicted.index, evicted.occupied)


def _turned(query: Tensor, slots: Slots, evicted: Evicted) -> Tensor:
    """Queries [B, H, W, D] as the merge leaves them. With positions in the cache the recent keys, and so the queries
    among them, move by as many places as slots are evicted."""
    if not slots.rotary.cache_positions:
        return query
    steps = -evicted.occupied.sum(-1, keepdim=True)
    return rotated(query, steps.expand(query.shape[:3]), slots.rotary)


def attended(fit: Fit, slots: Slots) -> Tensor:
    """[B, H, C] float32: the sum of the squares of the probabilities with which the reference queries attend to a slot.
    Those below 1e-6 count as none, so that what underflows in one backend and not in another decides nothing."""
    import torch

    query, seen = slots.extra
    read = attention(slots, slots.votes > 0, query, seen, fit.read_exponent)
    return torch.where(read > 1e-6, read * read, 0.0).sum(2)


def attention(slots: Slots, held: Tensor, query: Tensor, seen: Tensor, alpha: float) -> Tensor:
    """[B, H, W, C] float32: the probabilities with which queries attend to the slots `held`; arguments as of `logits`.
    All of a query that attends to nothing are 0."""
    return probabilities(logits(slots, held, query, seen, alpha))


def logits(slots: Slots, held: Tensor, query: Tensor, seen: Tensor, alpha: float) -> Tensor:
    """[B, H, W, C] float32: what queries [B, H, W, D] find of the slots `held` [B, H, C] bool, whose votes count to the
    power alpha; LOW where a query attends to none. seen [B, H, W] int32: the tokens that a query has seen, its own
    included; it attends to no later ones."""
    import torch

    visible = held[:, :, None] & (slots.position[:, :, None] < seen[..., None])
    bias = torch.where(held, alpha * torch.log(torch.where(held, slots.votes, 1.0)), 0.0)
    return torch.where(visible, query @ slots.key.float().transpose(-1, -2) + bias[:, :, None], LOW)


def probabilities(found: Tensor) -> Tensor:
    """The softmax of logits [..., C], of which those at LOW count for nothing."""
    mass = _masses(found, found.amax(-1, keepdim=True))
    return mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)


def shares_of(found: Tensor, whole: Tensor) -> Tensor:
    """The masses of logits [..., C] as shares of the mass of all of `whole` [..., C']; no logarithm is
    above MOST_SHARE."""
    import torch

    top = whole.amax(-1, keepdim=True)
    log_mass = top + torch.log(_masses(whole, top).sum(-1, keepdim=True).clamp(min=1e-30))
    return torch.where(found > LOW, torch.exp((found - log_mass).clamp(max=MOST_SHARE)), 0.0)


def _masses(found: Tensor, top: Tensor) -> Tensor:
    import torch

    visible = found > LOW
    return torch.where(visible, torch.exp(torch.where(visible, found - top, 0.0)), 0.0)


def fitted_values(read: Tensor, value: Tensor, output: Tensor, free: Tensor, ridge: float, change_max: float) -> Tensor:
    """Values [B, H, C, Dv] in float32 with which queries that attend by `read` [B, H, W, C] give `output` [B, H, W,
    Dv]: ``V + X^T (X X^T + ridge I)^-1 (Y - X V)`` over the slots `free` [B, H, C] bool, the ridge regression from
    `value` in its dual form, a system of W equations. The change of a head's free values is at most `change_max` of
    their norm."""
    import torch

    value = value.float()
    design = torch.where(free[:, :, None], read, 0.0)
    wanted = inverse(design @ design.transpose(-1, -2), ridge) @ (output - read @ value)
    change = design.transpose(-1, -2) @ wanted
    norm, largest = (
        (x * x).sum((-2, -1), keepdim=True).sqrt() for x in (change, torch.where(free[..., None], value, 0.0))
    )
    return value + change * (change_max * largest / norm.clamp(min=1e-30)).clamp(max=1.0)


def inverse(gram: Tensor, ridge: float) -> Tensor:
    """``(gram + ridge I)^-1`` of the products [..., W, W] of W rows of probabilities with one another, by Newton's
    iteration ``N <- N + N (I - A N)`` (Schulz 1933).

    It converges for all such products, in a number of steps that is known: A's eigenvalues are at least `ridge` and at
    most W + ridge, since no row's square is above 1. Every step mends the rounding errors of those before, so float32
    has it to about the condition, at most ``W / ridge + 1``, times 6e-8.
    """
    import torch

    size = gram.shape[-1]
    place = torch.arange(size, device=gram.device)
    one = (place[:, None] == place).to(gram.dtype)
    matrix = gram + ridge * one
    largest = matrix.sum(-1).amax(-1)[..., None, None]  # no eigenvalue is above the largest sum of a row
    found = (2.0 / (largest + ridge)) * one
    for _ in range(newton_steps(size, ridge)):
        found = found + found @ (one - matrix @ found)
    return found


def newton_steps(size: int, ridge: float) -> int:
    """So many steps that the error of the first guess, ``(k - 1) / (k + 1)`` for the condition k, is below 2^-24 after
    it was squared so often."""
    condition = size / ridge + 1.0
    return math.ceil(math.log2(24.0 * math.log(2.0) / math.log((condition + 1.0) / (condition - 1.0))))


def fitted_votes(
    fit: Fit, slots: Slots, merged: Slots, read: Tensor, shares: Tensor, kept: Tensor, evicted: Evicted
) -> Tensor:
    """Votes [B, H, C] with which the slots `kept` [B, H, C] bool, as the merge left them, hold the mass that the
    queries, by `read` [B, H, W, C], found in all: within ``exp(+-bias_max)``, and no more in sum than the free and the
    evicted ones had, as no slot stands for tokens that there never were. shares [B, H, W, C]: of that mass, what the
    kept slots hold now."""
    import torch

    free = evicted.can_receive
    votes = merged.votes * fitted_mass(read, shares, kept, free, fit.vote_steps)
    votes = votes.clamp(min=math.exp(-fit.bias_max), max=math.exp(fit.bias_max))
    most = torch.where(kept & ~free, 0.0, slots.votes).sum(-1, keepdim=True)
    votes = votes * (most / torch.where(free, votes, 0.0).sum(-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
    return torch.where(free & evicted.occupied.any(-1, keepdim=True), votes, merged.votes)


def fitted_mass(read: Tensor, shares: Tensor, kept: Tensor, free: Tensor, steps: int) -> Tensor:
    """[B, H, C] float32: factors of the votes of the slots `free`, 1 elsewhere, with which the slots `kept` (both [B,
    H, C] bool) hold the mass of all. read, shares [B, H, W, C]: the probabilities over all slots, and of their mass
    what the kept ones hold. A non-negative least-squares fit, ``min |sum_j f_j P_ij - 1|`` over the queries i, by
    `steps` multiplicative updates (Lee and Seung 2001), which start from 1 and need no bound to stay positive."""
    import torch

    design = torch.where(free[:, :, None], shares, 0.0)
    mass = torch.where((kept & ~free)[:, :, None], 0.0, read).sum(-1)  # of all but the fixed ones, for the free to hold
    wanted = (mass[:, :, None] @ design)[:, :, 0]
    factor = torch.ones_like(wanted)
    for _ in range(steps):
        held = (design @ factor[..., None]).transpose(-1, -2) @ design
        counts = free & (wanted > 1e-20) & (held[:, :, 0] > 1e-20)
        factor = torch.where(counts, factor * wanted / torch.where(counts, held[:, :, 0], 1.0), factor)
    return factor
