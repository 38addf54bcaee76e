"""ZeroMerge (arXiv 2503.10714): evicted cache slots join the running means of a few residual slots."""

from typing import ClassVar

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Statistic
from kvexport.schema.policy import MergePolicy


class ZeroMerge(Merging):
    """ZeroMerge: the cache consists of sinks (first positions), recent slots, context slots and residual slots.

    A slot's score is the attention that it received. The context slot of lowest score is evicted and merges into the
    residual slot whose key has the largest dot product with its own key. Residual slots are kept slots that receive
    merges: first those that have received a merge before, then, up to the share `residual`, those of lowest score.

    Attributes:
        alpha: The factor alpha of the attention bias ``alpha ln(votes)``, where votes is the number of tokens that a
            slot stands for.
        decay: The factor by which each query lowers the score.
        residual: The share of residual slots among the slots that are neither sinks nor recent. In the ZeroMerge paper,
            0.22 of the budget are residual slots and 0.44 context slots.
    """

    name: ClassVar[str] = "zeromerge"
    summary: ClassVar[str] = "the lowest score merges into a residual slot, as a running mean"
    source: ClassVar[str] = "arXiv 2503.10714"

    alpha: float = Field(0.6, gt=0.0, le=1.0)
    decay: float = Field(0.98, gt=0.0, le=1.0)
    residual: float = Field(0.33, gt=0.0, le=1.0)

    @property
    def vote_exponent(self) -> float:
        """The factor alpha of ``alpha * ln(votes)``, the bias on the attention logit of a slot for `votes` tokens."""
        return self.alpha

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The one statistic of a slot: the sum of its attention probabilities, which decays with each query."""
        return (Statistic("probability", self.decay),)

    def policy(self) -> MergePolicy:
        """Return this method's rule: slots with the smallest sum of attention merge into the nearest residual slot."""
        return self.selected(
            MergePolicy(select="score", merged_last=True, merge="running_mean", measure="dot", residual=self.residual)
        )
