"""What methods share whose policy fits the cache to reference queries: the ring of recent queries that they keep beside
the slots, and the settings of the fit of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Call, gather_rows
from kvexport.schema.policy import Fit
from kvexport.schema.state import StateTensor

if TYPE_CHECKING:
    from torch import Tensor


class Fitting(Merging):
    """Base of the methods that fit. A softcap of logits and sink logits have no part in the fit, which knows neither.

    queries: W, so many queries of every KV head are kept: the latest, of all query heads of its group.
    ridge: of the fit of values: the larger it is, the less changes for the sake of these queries.
    change_max: the values of a head change by at most this share of their norm in one merge.
    """

    queries: int = Field(32, ge=1, le=1024)
    ridge: float = Field(0.05, ge=1e-3)
    change_max: float = Field(0.1, gt=0.0)

    @property
    def extra_state(self) -> tuple[StateTensor, ...]:
        """The ring; zeros are an empty one."""
        rows = ("B", "H", self.queries)
        return (
            StateTensor("query", (*rows, "D"), "float32", "the latest queries, oldest first, times the logits' scale"),
            StateTensor("query_seen", rows, "int32", "the tokens that each has seen, its own included; 0: no query"),
        )

    @property
    def reference_queries(self) -> int:
        """The ring's rows."""
        return self.queries

    def update(self, extra: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
        """The ring with the call's queries at its end, token by token and head by head."""
        import torch

        ring, seen = extra
        batch, heads, rows, size = ring.shape
        group, tokens = call.query.shape[1] // heads, call.query.shape[2]
        query = (call.query.float() * call.scale).reshape(batch, heads, group, tokens, size)
        now_seen = (call.position + 1).to(torch.int32)[:, None, :, None].expand(batch, heads, tokens, group)
        query = torch.cat([ring, query.transpose(2, 3).reshape(batch, heads, -1, size)], dim=2)
        now_seen = torch.cat([seen, now_seen.reshape(batch, heads, -1)], dim=2)
        # As many rows fall out in front as real ones came; padding, which comes last, is never reached.
        first = call.real.to(torch.int64).sum(-1)[:, None, None] * group
        index = (first + torch.arange(rows, device=ring.device)).expand(batch, heads, rows)
        return gather_rows(query, index), gather_rows(now_seen, index)

    def fit(self, what: Literal["values", "votes_and_values"]) -> Fit:
        """The fit of the method's policy, which reads with its own votes' weight."""
        return Fit(what, self.ridge, self.change_max, self.vote_exponent)
