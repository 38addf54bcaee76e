"""KeepKV (arXiv 2504.09936): an evicted slot merges into its nearest neighbour without changing the current
attention output."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class KeepKV(Merging):
    """Electoral votes and zero-perturbation merging.

    decay: ``a`` of the moving average of exp(logit) (the paper leaves it open). window: queries of one call that count,
        0 = all.
    threshold: an evicted slot merges into the most similar target iff their keys' cosine is above it, and is dropped
        otherwise.
    zip: what absorbs the merge's error for the current query. ``key`` scales the merged key (the paper's Eq. 7),
        ``vote`` keeps the weighted mean and stores fractional votes, ``mean`` does neither (the authors' code; not
        lossless).
    key_factor_max: a key factor outside [1/x, x] falls back to ``vote`` for that slot (Eq. 7 has a pole and a sign
        flip).
    order: ``evict-first`` picks the lowest scores and merges what it can of them; ``merge-first`` evicts slots that
        have a neighbour of higher score above the threshold, lowest score first, and only then the lowest scores of the
        rest.
    pool: merge-first looks for such slots among the lowest scores, `pool` times as many as have to be evicted.
    recency_weight: weight of the newest query of the window against 1 for the oldest (the first version of the paper:
        1.2). The paper uses it to order slots of one window, where the sum of the weights does not matter; here it
        weighs a mean, so that scores stay
        logits, which `zip: key` needs.
    """

    name: ClassVar[str] = "keepkv"
    summary: ClassVar[str] = "votes and zero-perturbation merging into the most similar key"
    source: ClassVar[str] = "arXiv 2504.09936"

    decay: float = Field(0.9, gt=0.0, lt=1.0)
    window: int = Field(0, ge=0)
    threshold: float = Field(0.8, ge=-1.0, le=1.0)
    zip: Literal["key", "vote", "mean"] = "vote"
    key_factor_max: float = Field(2.0, ge=1.0)
    order: Literal["evict-first", "merge-first"] = "merge-first"
    pool: int = Field(4, ge=1)
    recency_weight: float = Field(1.0, ge=1.0)

    @property
    def vote_exponent(self) -> float:
        """Votes count in full: a slot of p votes attends like p equal keys."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """ln of the moving average of exp(raw logit)."""
        return (Statistic("log_ema", self.decay, self.window, self.recency_weight),)

    def policy(self) -> MergePolicy:
        """The bias-corrected average selects and weighs; a zip into the most similar key above the threshold."""
        return self.selected(
            MergePolicy(
                select="average",
                select_decay=self.decay,
                order="nearest" if self.order == "merge-first" else "lowest",
                eviction_pool=self.pool,
                merge="zip",
                measure="cosine",
                threshold=self.threshold,
                weigh_decay=self.decay,
                zip=self.zip,
                key_factor_max=self.key_factor_max,
            )
        )
