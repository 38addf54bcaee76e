"""KeepKV (arXiv 2504.09936): a merge of cache slots that leaves the current attention output unchanged."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class KeepKV(Merging):
    """KeepKV: merges that keep the attention output of the current query, and votes that count merged tokens.

    Attributes:
        decay: The factor ``a`` of the moving average of exp(logit). The paper does not give one.
        window: The number of last queries of one call that count; 0 for all.
        threshold: An evicted slot merges into the most similar target if the cosine of their keys is above this value,
            and is dropped otherwise.
        zip: How the merge cancels its error for the current query. ``key`` scales the merged key (the paper's Eq. 7).
            ``vote`` stores the weighted mean and fractional votes. ``mean`` does neither, like the authors' code, and
            is not lossless.
        key_factor_max: A merge with a key factor outside [1/x, x] uses ``vote`` instead, because Eq. 7 has a pole and a
            change of sign.
        order: ``evict-first`` evicts the lowest scores and merges those of them that have a target above the threshold.
            ``merge-first`` first evicts slots that have a target of higher score above the threshold, lowest score
            first, and then the lowest scores of the rest.
        pool: ``merge-first`` looks for such slots among the lowest scores only, `pool` times as many as have to be
            evicted.
        recency_weight: The weight of the newest query of the window, relative to 1 for the oldest. The first version of
            the paper uses 1.2 to rank the slots of one window, where the sum of the weights does not matter. Here it
            weights a mean, so that scores stay logits, which ``zip: key`` needs.
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
        """The factor alpha of the attention bias ``alpha * ln(votes)``, which is 1 for KeepKV.

        A slot of p votes therefore attracts as much attention as p equal keys.
        """
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The statistic of each slot: the logarithm of the moving average of exp(raw logit)."""
        return (Statistic("log_ema", self.decay, self.window, self.recency_weight),)

    def policy(self) -> MergePolicy:
        """Return the method's rule as data for the native kernels.

        The bias-corrected moving average of exp(logit) ranks slots and weights merges. An evicted slot merges into the
        slot of the most similar key if the similarity is above the threshold.
        """
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
