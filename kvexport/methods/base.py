"""A compression method: which statistics it keeps, which slots are evicted, and what they merge into.

A method is one file in this folder with one subclass of `Method`; `kvexport.methods` finds it by itself. The two
operators (`kvexport.ops`) do the rest. Nothing here imports torch when it is imported: recipes are validated on
machines without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from kvexport.methods.slots import Call, Evicted, Slots, Statistic
from kvexport.schema.policy import MergePolicy
from kvexport.schema.state import StateTensor

if TYPE_CHECKING:
    from torch import Tensor


class Method(BaseModel):
    """Base of all methods. Fields of a subclass are its parameters: a recipe's `cache.parameters`, and attributes of
    the node."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    compresses: ClassVar[bool] = True  # False: nothing is evicted but what a sliding window has passed
    allocation: ClassVar[Literal["uniform", "cosine", "pyramid"]] = (
        "uniform"  # how layers share the budget unless the recipe says
    )
    rotary: ClassVar[bool] = False  # True: `Slots.rotary` is needed

    @property
    def vote_exponent(self) -> float:
        """alpha of the read bias ``alpha * ln(votes)``."""
        return 0.0

    @property
    def recent_receives(self) -> bool:
        """Whether recent slots, which are never evicted, may be merged into."""
        return False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The K statistics that VoteAttention keeps; the first selects, the last weighs."""
        return (Statistic(),)

    @property
    def extra_state(self) -> tuple[StateTensor, ...]:
        """State tensors that the method keeps beside the contract's five. Unless overridden, none. No native kernel
        has them, but for the ring of reference queries: such a method runs from its functions."""
        return ()

    @property
    def reference_queries(self) -> int:
        """Rows of the ring of reference queries, where that is the state that the method keeps (`methods.fitting`),
        else 0."""
        return 0

    def update(self, extra: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
        """The tensors of `extra_state` after one call of VoteAttention; those of slots come with zeros where a slot was
        appended in this call. A sequence without real tokens must keep its own. Unless overridden, they stay as they
        are."""
        return extra

    def policy(self) -> MergePolicy | None:
        """The method's rule as data, which native kernels run; None where it is `keep_score` and `merge` of its own."""
        return None

    def keep_score(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """[B, H, C] float32: slots of the lowest keep score are evicted first, ties by the lowest position. `target`
        [B, H, C] bool marks used slots that are neither sinks nor recent; the value elsewhere does not matter. count:
        how many are evicted, at the most. Unless overridden, what the policy says."""
        from kvexport.methods.primitives.select import keep_score

        policy = self.policy()
        if policy is None:
            raise NotImplementedError(f"{self.name} has neither a policy nor a keep_score")
        return keep_score(policy, slots, target, count)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """The cache in which every kept slot has taken in what it should of the evicted ones. Unless overridden, what
        the policy says; without one they are dropped."""
        from kvexport.methods.primitives.merge import merge

        policy = self.policy()
        return slots if policy is None else merge(policy, self.statistics, slots, evicted)
