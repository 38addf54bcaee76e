"""Attention Matching (arXiv 2602.16284): votes and values of the kept slots are fitted to the mass and the outputs of
recent queries."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.ballot import Ballot
from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class AttentionMatching(Fitting):
    """The slots stay that the reference queries attend to most, by the root mean square of their probabilities; votes
    are fitted so that they hold the mass that these queries found in all slots (the paper's bias is ``ln(votes)``),
    then values so that they give the same outputs, by a ridge regression from the values that are there: W queries
    leave open what more than W slots should hold.

    steps: multiplicative updates of the fit of votes. bias_max: votes stay within ``exp(+-bias_max)``; nor do they
    become more in sum than they were, as no slot stands for tokens that there never were.
    after: what the fit follows; ``drop`` as above; ``ballot``, which is ours: slots are evicted and merge as `ballot`
        does it, with its defaults, and recent ones are fitted as well.

    The paper compresses a prompt once, by queries that the model makes up about it, in budgets of each head's own. Here
    the queries are the latest, budgets are equal, and what was fitted is fitted again.
    """

    name: ClassVar[str] = "attention_matching"
    summary: ClassVar[str] = "votes and values are fitted to the mass and the outputs that recent queries found"
    source: ClassVar[str] = "arXiv 2602.16284"

    steps: int = Field(8, ge=0, le=64)
    bias_max: float = Field(3.0, gt=0.0)
    after: Literal["drop", "ballot"] = "drop"

    @property
    def recent_receives(self) -> bool:
        """Where ballot's do."""
        return self.after == "ballot"

    @property
    def vote_exponent(self) -> float:
        """Votes count in full."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """Ballot's, or none: the ring says what is attended to."""
        return Ballot().own_statistics if self.after == "ballot" else (Statistic(),)

    def policy(self) -> MergePolicy:
        """The reference queries select, and evicted slots are dropped; or ballot's. The selector may be another."""
        fit = replace(self.fit("votes_and_values"), vote_steps=self.steps, bias_max=self.bias_max)
        merge = Ballot().policy() if self.after == "ballot" else MergePolicy(select="attended", fit=fit)
        return self.selected(replace(merge, fit=fit))
