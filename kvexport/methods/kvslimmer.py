"""KVSlimmer (arXiv 2603.00907): neighbouring pairs merge with the weights of the exact Hessian, from the forward pass
alone."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from kvexport.methods.pairing import NeighbourPairs
from kvexport.schema.policy import MergePolicy


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

    def policy(self) -> MergePolicy:
        """Pairs, keys weighed by the guarded brackets."""
        return replace(super().policy(), weigh="hessian", tau=self.tau)
