"""`ballot` whose values are then fitted to reference queries, for comparison: it is no method of kvexport and runs from
its function."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kvexport.methods import all_methods
from kvexport.methods.ballot import Ballot
from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


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

    def policy(self) -> MergePolicy:
        """Ballot's, then the values."""
        return replace(Ballot().policy(), fit=self.fit("values"))


def register() -> None:
    """Let recipes of this process name it."""
    all_methods()[BallotFitted.name] = BallotFitted
