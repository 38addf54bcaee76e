"""Fitted keys after KVSculpt (arXiv 2603.27819), for prompts that are compressed once; used by `newer_methods.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kvexport.methods.attention_matching import AttentionMatching
from kvexport.methods.primitives import fit as fits
from kvexport.methods.slots import Evicted, Slots, gather_rows

STEPS = 40  # iterations of L-BFGS
STAY = 1e-3  # the weight of the keys' relative change


class FittedKeys(AttentionMatching):
    """`attention_matching` after `ballot`, then keys by L-BFGS, then values by ridge regression again.

    The loss is the relative error of the reference queries' attention outputs, plus the squared error of the logarithm
    of their attention mass, which later tokens compete with.
    """

    name: ClassVar[str] = "fitted_keys"

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Return the slots of `attention_matching` with other keys and values of the slots that can receive."""
        merged = super().merge(slots, evicted)
        query, seen = slots.extra
        used = slots.votes > 0
        logits = fits.logits(slots, used, query, seen, 1.0)
        output, mass = fits.probabilities(logits) @ slots.value.float(), logits.logsumexp(-1)
        kept = used & torch.ones_like(used).scatter(-1, evicted.index, ~evicted.occupied)
        count = int(kept.sum(-1).max())
        index = kept.long().sort(dim=-1, descending=True, stable=True).indices[..., :count]
        there = kept.gather(-1, index)
        free = evicted.can_receive.gather(-1, index) & there
        own, votes = (gather_rows(x, index).float() for x in (merged.key, merged.votes))
        position = merged.position.gather(-1, index)
        sees = there[:, :, None] & (position[:, :, None] < seen[..., None])
        bias = torch.where(sees, votes.clamp(min=1e-30).log()[:, :, None], fits.LOW)
        value = gather_rows(merged.value, index).float()
        key = _fitted(own, value, query, bias, output, mass, free)
        read = (query @ key.transpose(-1, -2) + bias).softmax(-1)
        value = fits.fitted_values(read, value, output, free, self.ridge, self.change_max)
        return replace(merged, key=_put(merged.key, index, key), value=_put(merged.value, index, value))


def _put(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.scatter(2, index[..., None].expand(rows.shape), rows.to(x.dtype))


def _fitted(
    own: Tensor, value: Tensor, query: Tensor, bias: Tensor, output: Tensor, mass: Tensor, free: Tensor
) -> Tensor:
    """Return keys [B, H, C, D] that give the queries nearly the attention output [B, H, W, Dv] and the mass [B, H, W].

    Args:
        own: The keys before the fit, [B, H, C, D].
        value: [B, H, C, Dv].
        query: [B, H, W, D], times the scale of logits.
        bias: [B, H, W, C], added to the logits.
        output: The outputs to approximate.
        mass: ln of the sum of exp(logit) to approximate.
        free: [B, H, C] bool, the slots whose keys may change.
    """
    norm = own.square().sum((-2, -1), keepdim=True)
    size = output.square().sum((-2, -1), keepdim=True)
    change = torch.zeros_like(own).requires_grad_()
    optimizer = torch.optim.LBFGS([change], max_iter=STEPS, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        moved = torch.where(free[..., None], change, 0.0)
        logits = query @ (own + moved).transpose(-1, -2) + bias
        wrong = ((logits.softmax(-1) @ value - output).square() / size).sum()
        total = wrong + (logits.logsumexp(-1) - mass).square().mean(-1).sum()
        total = total + STAY * (moved.square() / norm).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return own + torch.where(free[..., None], change.detach(), 0.0)
