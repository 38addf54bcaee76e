"""Attention Matching (arXiv 2602.16284): votes and values of the kept slots are fitted to the mass and the outputs of
recent queries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvexport.methods.fitting import Fitting, kept_slots
from kvexport.methods.slots import Evicted, Slots, Statistic

if TYPE_CHECKING:
    from torch import Tensor


class AttentionMatching(Fitting):
    """The slots stay that the reference queries attend to most, by the root mean square of their probabilities; votes
    are fitted so that they hold the mass that these queries found in all slots (the paper's bias is ``ln(votes)``),
    then values so that they give the same outputs, by a ridge regression from the values that are there: W queries
    leave open what more than W slots should hold.

    steps: multiplicative updates of the fit of votes. bias_max: votes stay within ``exp(+-bias_max)``; nor do they
    become more in sum than they were, as no slot stands for tokens that there never were.

    The paper compresses a prompt once, by queries that the model makes up about it, in budgets of each head's own. Here
    the queries are the latest, budgets are equal, and what was fitted is fitted again.
    """

    name: ClassVar[str] = "attention_matching"
    summary: ClassVar[str] = "votes and values are fitted to the mass and the outputs that recent queries found"
    source: ClassVar[str] = "arXiv 2602.16284"

    steps: int = Field(8, ge=0, le=64)
    bias_max: float = Field(3.0, gt=0.0)

    @property
    def vote_exponent(self) -> float:
        """Votes count in full."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """None: the ring says what is attended to."""
        return (Statistic(),)

    def importance(self, slots: Slots, target: Tensor) -> Tensor:
        """By the reference queries, or by the selector's rule. Probabilities below 1e-6 count as none, so that what
        underflows in one backend and not in another decides nothing."""
        import torch

        from kvexport.methods.primitives.fit import attention

        if self.selector != "own":
            return super().importance(slots, target)
        query, seen = slots.extra
        read = attention(slots, slots.votes > 0, query, seen, self.vote_exponent)
        return torch.where(read > 1e-6, read * read, 0.0).sum(2)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Votes, then values, in float32 until they are stored."""
        import torch

        from kvexport.methods.primitives.fit import attention, fitted_mass

        query, seen = slots.extra
        free, kept = evicted.can_receive, kept_slots(slots, evicted)
        read = attention(slots, slots.votes > 0, query, seen, self.vote_exponent)
        votes = slots.votes * fitted_mass(read, kept, free, self.steps)
        votes = votes.clamp(min=math.exp(-self.bias_max), max=math.exp(self.bias_max))
        most = torch.where(kept & ~free, 0.0, slots.votes).sum(-1, keepdim=True)  # of the free ones and the evicted
        votes = votes * (most / torch.where(free, votes, 0.0).sum(-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
        votes = torch.where(free & evicted.occupied.any(-1, keepdim=True), votes, slots.votes)
        return self.fitted(slots, replace(slots, votes=votes), evicted)
