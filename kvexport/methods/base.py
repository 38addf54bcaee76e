"""The base class of KV cache compression methods.

A method decides which statistics of attention are kept for a cache slot, which slots are evicted, and what evicted
slots merge into. A method is one file in kvexport/methods with one subclass of `Method`. The operators of
`kvexport.ops` call the methods. No module of the package imports torch at import time, because recipes are validated on
machines without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from kvexport.methods.slots import Evicted, NewTokens, Slots, Statistic
from kvexport.schema.policy import MergePolicy
from kvexport.schema.state import StateTensor

if TYPE_CHECKING:
    from torch import Tensor


class Method(BaseModel):
    """The base class of all KV cache compression methods.

    The pydantic fields of a subclass are the method's parameters. A recipe sets them under `cache.parameters`.

    Attributes:
        name: The name that recipes use.
        summary: One line for listings of methods.
        source: The paper that the method comes from.
        compresses: False if the method evicts nothing except entries that a sliding window has passed.
        allocation: The default rule by which layers share the budget of cache slots.
        rotary: True if the merge reads `Slots.rotary`, the layer's rotary embedding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    compresses: ClassVar[bool] = True
    allocation: ClassVar[Literal["uniform", "cosine", "pyramid"]] = "uniform"
    rotary: ClassVar[bool] = False

    @property
    def vote_exponent(self) -> float:
        """The factor alpha, default 0: the logit of a slot that stands for n tokens gets the bias ``alpha ln(n)``."""
        return 0.0

    @property
    def recent_receives(self) -> bool:
        """Whether evicted slots may merge into slots of the recent window, which are never evicted themselves."""
        return False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The K attention statistics of each slot: the first ranks slots for eviction, the last weights merges."""
        return (Statistic(),)

    @property
    def extra_state(self) -> tuple[StateTensor, ...]:
        """The state tensors that a method keeps beside keys, values, votes (token counts), scores and positions.

        By default there are none. A tensor has a dimension S, with one element for each slot of all KV heads, or begins
        with the dimensions B (batch) and H (KV heads). The method's code gets the tensors of KV heads with equal
        capacity as [B, H, C, ...], where C counts slots. Native kernels support only the ring buffer of recent queries.
        A method with other additional tensors runs as ONNX functions.
        """
        return ()

    @property
    def reference_queries(self) -> int:
        """The number of recent queries that the method stores in a ring buffer for its fits; 0 without a buffer."""
        return 0

    @property
    def merges_values_as_keys(self) -> bool:
        """Whether merged keys and values are means with the same weights, and nothing else changes them.

        In latent attention a value is a part of its key. After such a merge the value is still that part of the key, so
        that the cache stores only keys. By default the result depends on `policy`; a method whose `policy` returns None
        returns False.
        """
        policy = self.policy()
        if policy is None or policy.fit is not None:
            return False
        return policy.merge in ("drop", "running_mean") or (policy.merge == "zip" and policy.zip != "key")

    def update(self, extra: tuple[Tensor, ...], new: NewTokens) -> tuple[Tensor, ...]:
        """Return the tensors of `extra_state` after one call of VoteAttention; by default unchanged.

        In `extra`, the elements of the slots that the call appended are zero. Tensors of a sequence that got only
        padding must stay unchanged.
        """
        return extra

    def policy(self) -> MergePolicy | None:
        """Return the eviction and merge rule as data; None if `keep_score` or `merge` is overridden instead."""
        return None

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return a keep score for each slot, [B, H, C] float32: the lowest are evicted first, ties by lowest position.

        Args:
            slots: The layer's cache.
            unprotected: [B, H, C] bool. True for occupied slots that are neither sinks nor recent; the scores of
                others have no effect.
            count: The largest number of slots that a head evicts.
        """
        from kvexport.methods.primitives.select import keep_score

        policy = self.policy()
        if policy is None:
            raise NotImplementedError(f"{self.name} has neither a policy nor a keep_score")
        return keep_score(policy, slots, unprotected, count)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Return a layer's KV cache after evicted slots have merged into kept slots, by default as `policy` says.

        The result still contains the evicted slots, which the caller removes. If `policy` returns None, evicted slots
        are dropped.
        """
        from kvexport.methods.primitives.merge import merge

        policy = self.policy()
        return slots if policy is None else merge(policy, self.statistics, slots, evicted)
