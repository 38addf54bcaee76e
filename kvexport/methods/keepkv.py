"""KeepKV (arXiv 2504.09936): a merge of cache slots that leaves the current attention output unchanged."""

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class KeepKV(Merging):
    """KeepKV: merges that keep the attention output of the current query. Each slot counts its tokens (its votes).

    Attributes:
        decay: The factor ``a`` of the moving average of exp(logit), ``average = a average + (1 - a) new``. The KeepKV
            paper does not give one.
        window: The number of last queries of a model call that count in the moving average; 0 for all.
        threshold: An evicted slot merges into the kept slot of the most similar key if the cosine of the two keys is
            above this value, and is dropped otherwise.
        zip: The quantity by which a merge cancels its error for the current query. ``key`` scales the merged key (Eq. 7
            of the KeepKV paper). ``vote`` stores the weighted mean of the keys and a fractional token count. ``mean``
            does neither, like the authors' code, and is not lossless.
        key_factor_max: A bound x for ``zip: key``. A merge whose key would be scaled by a factor outside [1/x, x] uses
            ``zip: vote`` instead, because Eq. 7 of the KeepKV paper has a pole and a change of sign.
        order: ``evict-first`` evicts the slots of lowest score, and merges those that have a target above the
            threshold. ``merge-first`` first evicts slots that have a target of higher score above the threshold, lowest
            score first, and then the slots of lowest score among the rest.
        pool: The size of the eviction pool of ``order: merge-first``, as a multiple of the number of slots to evict.
            The pool holds the slots of lowest score, among which those with a target are evicted first.
        recency_weight: The weight of the newest query of the window, relative to 1 for the oldest. The first version of
            the paper uses 1.2 to rank the slots of one window, where the sum of the weights does not matter. kvexport
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
        """The factor alpha is 1: a slot with votes p (it stands for p tokens) attracts attention like p equal keys."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The one statistic of a slot: the logarithm of the moving average of exp(logit), without ln(votes)."""
        return (Statistic("log_ema", self.decay, self.window, self.recency_weight),)

    def policy(self) -> MergePolicy:
        """Return this method's rule: which slots are evicted, and that they merge into the slot of most similar key."""
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
