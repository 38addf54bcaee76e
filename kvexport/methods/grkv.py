"""GRKV (arXiv 2605.31105): a ridge regression spreads over all kept slots what recent queries read from evicted
ones."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Statistic
from kvexport.methods.snapkv import SnapKV
from kvexport.schema.policy import MergePolicy


class GRKV(Fitting):
    """Evicted slots are dropped, and the values of the others take over their part of the attention output: ``V + X^T
    (X X^T + ridge I)^-1 (Y - X V)``, X what the reference queries attend to, Y what they read before. `own` selects as
    snapkv does, with its defaults.

    The authors take 32 queries from all over a prompt that is compressed once, as if they stood at its end, select by a
    variant of AdaKV, whose heads have budgets of their own, and turn keys too, by a linearised step of at most 2.5 % of
    their norm. Here the queries are the latest, budgets are equal, and keys stay.
    """

    name: ClassVar[str] = "grkv"
    summary: ClassVar[str] = "a ridge regression spreads what recent queries read of evicted slots over all kept ones"
    source: ClassVar[str] = "arXiv 2605.31105"

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """Those of snapkv."""
        return SnapKV().statistics

    def policy(self) -> MergePolicy:
        """By the selector's rule, which is snapkv's own where there is no other; evicted slots are dropped."""
        return self.selected(replace(SnapKV().policy(), fit=self.fit("values")))
