"""The compression method `ballot`, kvexport's own: evict the cache slots that another slot can replace best.

`ballot` merges an evicted slot into the slot with the nearest key. The votes of both slots (the number of tokens that a
slot stands for) add up, but to at most `votes_max`.
"""

from typing import ClassVar, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class Ballot(Merging):
    """Ballot, kvexport's own method: KeepKV's merge without a similarity threshold, and eviction by merge error.

    KeepKV drops an evicted slot if no key is similar enough, and the slot's attention mass is lost. If a merge replaces
    key k_e by key k_c, ``|q (k_e - k_c)| <= |q| |k_e - k_c|`` bounds the change of a query q's logit. The cosine of the
    two keys gives no such bound if their norms differ. Past attention alone does not show which slots are superfluous,
    because a slot that no query has needed yet has received no attention. The error of a merge into another slot shows
    how superfluous a slot is.

    Attributes:
        order: ``least-error`` first evicts the slots whose merge costs least. The cost of merging slot e into slot c is
            ``w^attention |k_e - k_c|^2 |v_e - v_c|^2`` for keys k and values v, where w is the mean attention
            probability that slot e receives and c is the slot of higher w that gives the smallest cost.
            ``least-attended`` first evicts the slots of lowest w.
        attention: The exponent of w, the slot's mean attention probability, in the cost of ``order: least-error``.
        pool: The size of the eviction pool, as a multiple of the number of slots to evict. The cost of a merge is
            computed only for the slots of this pool, those of lowest mean attention probability.
        zip: ``count`` adds up the token counts (votes) of merged slots. ``vote`` stores a fractional token count. Both
            store the weighted mean of the keys. The fractional count is exact for a query whose logits equal the slots'
            moving averages. For every other query it is too small, and the error grows with every merge.
        votes_max: The largest number of tokens that a merged slot stands for. After hundreds of merges a slot is a mean
            of unrelated tokens and carries no information. Without a bound it would still get the attention of all
            these tokens.
        decay: The factor ``a`` of the moving average of exp(logit) that weights a merge: ``average = a average +
            (1 - a) new``.
    """

    name: ClassVar[str] = "ballot"
    summary: ClassVar[str] = "slots that another one stands for best are evicted into the nearest key; no threshold"
    source: ClassVar[str] = "this project"

    order: Literal["least-error", "least-attended"] = "least-error"
    attention: float = Field(0.5, ge=0.0)
    pool: int = Field(4, ge=1)
    zip: Literal["vote", "count"] = "count"
    votes_max: float = Field(32.0, ge=1.0)
    decay: float = Field(0.95, gt=0.0, lt=1.0)

    @property
    def recent_receives(self) -> bool:
        """Whether evicted slots may merge into slots of the recent window, which are never evicted: true."""
        return True

    @property
    def vote_exponent(self) -> float:
        """The factor alpha is 1: the attention logit of a slot that stands for n tokens gets the bias ln(n)."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """A slot's two statistics: a sum of attention probabilities ranks slots, a mean of exp(logit) weighs merges."""
        return (Statistic("probability"), Statistic("log_ema", self.decay))

    def policy(self) -> MergePolicy:
        """Return this method's rule: evict by merge error or by attention, and merge into the slot of nearest key."""
        return self.selected(
            MergePolicy(
                select="mean",
                order="least_error" if self.order == "least-error" else "lowest",
                eviction_pool=self.pool,
                error_exponent=self.attention,
                merge="zip",
                measure="distance",
                weigh_decay=self.decay,
                zip="vote" if self.zip == "vote" else "mean",
                votes_max=self.votes_max,
                mean_adds=True,
            )
        )
