"""KVSlimmer (arXiv 2603.00907): neighbouring cache slots merge in pairs, keys weighted by the exact Hessian.

The Hessian needs only quantities of the forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from kvexport.methods.pairing import NeighbourPairs
from kvexport.schema.policy import MergePolicy


class KVSlimmer(NeighbourPairs):
    """KVSlimmer: neighbouring slots merge in pairs whose keys are weighted by terms of the Hessian.

    With ``a = A / sum A`` for the accumulated probability A, and ``o = sum a v``, the terms are ``c_ii = a_i (1 - 2
    a_i)(v_i - o)`` and ``c_12 = -a_1 a_2 (v_1 + v_2 - 2 o)``. The weight of key i is ``max(|c_ii| - |c_12|, 0)``.

    Attributes:
        tau: If the sum of both weights is at most ``tau (|c_11| + |c_22|)``, the weights are a_1 and a_2 instead, which
            is the limit for equal residuals.
    """

    name: ClassVar[str] = "kvslimmer"
    summary: ClassVar[str] = "neighbouring pairs merge by exact Hessian weights"
    source: ClassVar[str] = "arXiv 2603.00907"

    tau: float = Field(1e-3, ge=0.0, lt=1.0)

    def policy(self) -> MergePolicy:
        """Return the method's rule as data for the native kernels: neighbours merge in pairs with Hessian weights."""
        return replace(super().policy(), weigh="hessian", tau=self.tau)
