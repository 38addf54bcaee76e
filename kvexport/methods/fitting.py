"""The base class of methods that, after an eviction, fit values (or token counts too) of kept slots to queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import NewTokens, gather_rows
from kvexport.schema.policy import Fit
from kvexport.schema.state import StateTensor

if TYPE_CHECKING:
    from torch import Tensor


class Fitting(Merging):
    """A method that stores recent queries, and fits the values of kept cache slots to them after a merge.

    After the fit, the stored queries get nearly the same attention outputs from the kept slots as from all slots before
    the eviction. The fit ignores a softcap of logits and learned sink logits.

    Attributes:
        queries: The number W of latest queries that are stored for each KV head. The query heads of the group share the
            ring buffer.
        ridge: The regularization of the fit of values. The larger it is, the less the values change.
        change_max: The values of a head change by at most this share of their norm in one merge.
    """

    queries: int = Field(32, ge=1, le=1024)
    ridge: float = Field(0.05, ge=1e-3)
    change_max: float = Field(0.1, gt=0.0)

    @property
    def extra_state(self) -> tuple[StateTensor, ...]:
        """The ring buffer of recent queries, to which values of kept slots are fitted; all zeros is an empty buffer."""
        rows = ("B", "H", self.queries)
        return (
            StateTensor("query", (*rows, "D"), "float32", "the latest queries, oldest first, times the logits' scale"),
            StateTensor(
                "query_seen", rows, "int32", "the number of tokens that each query has seen, with its own; 0: no query"
            ),
        )

    @property
    def reference_queries(self) -> int:
        """The number of recent queries in the method's ring buffer."""
        return self.queries

    def update(self, extra: tuple[Tensor, ...], new: NewTokens) -> tuple[Tensor, ...]:
        """Return the ring buffer of recent queries with the call's queries appended: by token, then by query head."""
        import torch

        ring, seen = extra
        batch, heads, rows, size = ring.shape
        group, tokens = new.query.shape[1] // heads, new.query.shape[2]
        query = (new.query.float() * new.scale).reshape(batch, heads, group, tokens, size)
        new_seen = (new.position + 1).to(torch.int32)[:, None, :, None].expand(batch, heads, tokens, group)
        query = torch.cat([ring, query.transpose(2, 3).reshape(batch, heads, -1, size)], dim=2)
        seen = torch.cat([seen, new_seen.reshape(batch, heads, -1)], dim=2)
        # The ring drops as many rows at its front as real queries arrived. The window below ends before the padding,
        # which comes last.
        first = new.real.to(torch.int64).sum(-1)[:, None, None] * group
        index = (first + torch.arange(rows, device=ring.device)).expand(batch, heads, rows)
        return gather_rows(query, index), gather_rows(seen, index)

    def fit(self, fitted: Literal["values", "votes_and_values"]) -> Fit:
        """Return the settings of the fit, which changes values (or token counts and values) to suit recent queries."""
        return Fit(fitted, self.ridge, self.change_max, self.vote_exponent)
