"""GRKV (arXiv 2605.31105): a ridge regression changes kept values so that they replace evicted cache slots."""

from dataclasses import replace
from typing import ClassVar

from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Statistic
from kvexport.methods.snapkv import SnapKV
from kvexport.schema.policy import MergePolicy


class GRKV(Fitting):
    """GRKV: evicted slots are dropped, and the values of the kept slots are fitted to replace them.

    The new values are ``V + X^T (X X^T + ridge I)^-1 (Y - X V)``. V holds the kept values, X the probabilities with
    which stored recent queries attend to the kept slots, and Y the attention outputs of these queries before the
    eviction. With the selector ``own``, GRKV evicts the slots that snapkv with its defaults would evict.

    The authors of GRKV draw 32 queries from the whole prompt, compress it once, and treat the queries as if they stood
    at its end. They select slots by a variant of AdaKV with a budget for each head, and change keys too, by a
    linearised step of at most 2.5 % of their norm. In kvexport the queries are the latest ones, all heads have the same
    budget, and keys stay unchanged.
    """

    name: ClassVar[str] = "grkv"
    summary: ClassVar[str] = "a ridge regression spreads what recent queries read of evicted slots over all kept ones"
    source: ClassVar[str] = "arXiv 2605.31105"

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The attention statistics of each slot with the setting ``selector: own``: those of the method `snapkv`."""
        return SnapKV().statistics

    def policy(self) -> MergePolicy:
        """Return this method's rule: evict like snapkv or another selector, then refit the values to the outputs."""
        return self.selected(replace(SnapKV().policy(), fit=self.fit("values")))
