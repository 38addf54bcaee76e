"""`ballot` whose values are then fitted to reference queries, for comparison: it is no method of kvexport and runs from
its function."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvexport.methods import all_methods
from kvexport.methods.ballot import Ballot
from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Evicted, Slots, Statistic

if TYPE_CHECKING:
    from torch import Tensor


class BallotFitted(Fitting):
    """What is evicted, and what it merges into, is ballot's with its defaults; the ridge regression starts from the
    merge."""

    name: ClassVar[str] = "ballot_fitted"
    summary: ClassVar[str] = "ballot, then values are fitted to recent queries"
    source: ClassVar[str] = "this project"
    recent_receives: ClassVar[bool] = True

    @property
    def vote_exponent(self) -> float:
        """Votes count in full."""
        return Ballot().vote_exponent

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """Those of ballot."""
        return Ballot().own_statistics

    def keep_score(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """As of ballot."""
        return Ballot().keep_score(slots, target, count)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """The merge, then the values."""
        return self.fitted(slots, Ballot().merge(slots, evicted), evicted)


def register() -> None:
    """Let recipes of this process name it."""
    all_methods()[BallotFitted.name] = BallotFitted
