"""Attention Matching (arXiv 2602.16284): token counts and values of kept cache slots are fitted to recent queries.

The token counts (votes: how many tokens a slot stands for in attention) are fitted to the attention mass of the
queries, and the values to their attention outputs.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.ballot import Ballot
from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class AttentionMatching(Fitting):
    """Attention Matching: keep the slots that recent queries attend to most, then fit their token counts and values.

    The method stores recent queries of each KV head, the reference queries. Slots are ranked by the root mean square of
    the probabilities with which the reference queries attend to them. The votes of the kept slots (token counts, by
    which a slot's logit gets the bias ``ln(votes)``) are fitted so that these slots get the attention mass that the
    queries gave to all slots. The values are then fitted so that the attention outputs stay the same. The fit of the
    values is a ridge regression towards the present values, because W queries do not determine the values of more than
    W slots.

    The paper compresses a prompt once, with queries that the model generates about the prompt and with a budget for
    each head. In kvexport the reference queries are the latest ones, all heads have the same budget, and every merge
    fits the slots again.

    Attributes:
        steps: The number of multiplicative updates in the fit of the token counts (votes).
        bias_max: Fitted token counts (votes) stay within ``exp(+-bias_max)``. Their sum never grows, because no slot
            stands for tokens that never existed.
        after: The eviction before the fit. ``drop`` is the rule above. ``ballot``, this project's own variant, evicts
            and merges like the method `ballot` with its defaults, and also fits recent slots.
    """

    name: ClassVar[str] = "attention_matching"
    summary: ClassVar[str] = "votes and values are fitted to the mass and the outputs that recent queries found"
    source: ClassVar[str] = "arXiv 2602.16284"

    steps: int = Field(8, ge=0, le=64)
    bias_max: float = Field(3.0, gt=0.0)
    after: Literal["drop", "ballot"] = "drop"

    @property
    def recent_receives(self) -> bool:
        """Whether evicted slots may merge into recent slots: true with ``after: ballot``, the only case with merges."""
        return self.after == "ballot"

    @property
    def vote_exponent(self) -> float:
        """The factor alpha is 1: the attention logit of a slot that stands for n tokens gets the bias ln(n)."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """A slot's attention statistics: those of `ballot` with ``after: ballot``, otherwise none."""
        return Ballot().own_statistics if self.after == "ballot" else (Statistic(),)

    def policy(self) -> MergePolicy:
        """Return this method's rule: the eviction that `after` names, then a fit of kept slots to recent queries."""
        fit = replace(self.fit("votes_and_values"), vote_steps=self.steps, bias_max=self.bias_max)
        merge = Ballot().policy() if self.after == "ballot" else MergePolicy(select="attended", fit=fit)
        return self.selected(replace(merge, fit=fit))
