"""KVSlimmer (arXiv 2603.00907): neighbouring pairs merge with the weights of the exact Hessian, from the forward pass
alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvexport.methods.base import Slots
from kvexport.methods.joint import Groups
from kvexport.methods.pairs import NeighbourPairs

if TYPE_CHECKING:
    from torch import Tensor


class KVSlimmer(NeighbourPairs):
    """With ``a = A / sum A`` of the accumulated probability and ``o = sum a v``: ``c_ii = a_i (1 - 2 a_i)(v_i - o)``,
    ``c_12 = -a_1 a_2 (v_1 + v_2 - 2 o)``; key i weighs ``max(|c_ii| - |c_12|, 0)``.

    tau: where both brackets together are below ``tau (|c_11| + |c_22|)`` the keys weigh a_1, a_2, the limit for equal
        residuals.
    """

    name: ClassVar[str] = "kvslimmer"
    summary: ClassVar[str] = "neighbouring pairs merge by exact Hessian weights"
    source: ClassVar[str] = "arXiv 2603.00907"

    tau: float = Field(1e-3, ge=0.0, lt=1.0)

    def key_weights(self, slots: Slots, groups: Groups) -> tuple[Tensor, Tensor]:
        """The guarded brackets."""
        import torch

        mass = torch.where(slots.votes > 0, slots.score[:, :, -1], 0.0)
        share = mass / torch.clamp(mass.sum(-1, keepdim=True), min=1e-30)
        output = share[:, :, None, :] @ torch.where(slots.votes[..., None] > 0, slots.value.float(), 0.0)
        a, a_v = groups.pair(share)
        residual, residual_v = (x - output for x in groups.pair(slots.value))
        c11, c22 = (
            (a * (1.0 - 2.0 * a)).abs() * residual.norm(dim=-1),
            (a_v * (1.0 - 2.0 * a_v)).abs() * residual_v.norm(dim=-1),
        )
        c12 = a * a_v * (residual + residual_v).norm(dim=-1)
        own, arriving = torch.clamp(c11 - c12, min=0.0), torch.clamp(c22 - c12, min=0.0)
        degenerate = own + arriving <= self.tau * (c11 + c22)
        return torch.where(degenerate, a, own), torch.where(degenerate, a_v, arriving)
