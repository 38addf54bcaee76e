"""`ballot` with values fitted to reference queries, which kvexport does not have. It runs as an ONNX function."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kvexport.methods import all_methods
from kvexport.methods.ballot import Ballot
from kvexport.methods.fitting import Fitting
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class BallotFitted(Fitting):
    """The method that evicts and merges as ballot does with its defaults, then fits the values by ridge regression.

    The regression starts from the merged values.
    """

    name: ClassVar[str] = "ballot_fitted"
    summary: ClassVar[str] = "ballot, then values are fitted to recent queries"
    source: ClassVar[str] = "this project"
    recent_receives: ClassVar[bool] = True

    @property
    def vote_exponent(self) -> float:
        """The exponent of votes, as in ballot."""
        return Ballot().vote_exponent

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The statistics of ballot."""
        return Ballot().own_statistics

    def policy(self) -> MergePolicy:
        """Return ballot's policy with the fit of values."""
        return replace(Ballot().policy(), fit=self.fit("values"))


def register() -> None:
    """Register the method, so that recipes of this process can name it."""
    all_methods()[BallotFitted.name] = BallotFitted
