"""KVSlimmer (arXiv 2603.00907): neighbouring cache slots merge in pairs, keys weighted by the exact Hessian."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from kvexport.methods.pairing import NeighbourPairs
from kvexport.schema.policy import MergePolicy


class KVSlimmer(NeighbourPairs):
    """KVSlimmer: neighbouring slots merge in pairs whose keys are weighted by terms of the Hessian.

    The Hessian needs only quantities of the forward pass. With ``a = A / sum A`` for a slot's accumulated probability
    A, and ``o = sum a v`` over the values v, the terms of the Hessian for a pair of slots 1 and 2 are ``c_ii = a_i (1 -
    2 a_i)(v_i - o)`` and ``c_12 = -a_1 a_2 (v_1 + v_2 - 2 o)``. The weight of key i is ``max(|c_ii| - |c_12|, 0)``.

    Attributes:
        tau: If the sum of both weights of a pair is at most ``tau (|c_11| + |c_22|)``, with the terms c of the Hessian,
            the accumulated probabilities are the weights instead. They are the limit for slots whose values differ
            equally from the attention output.
    """

    name: ClassVar[str] = "kvslimmer"
    summary: ClassVar[str] = "neighbouring pairs merge by exact Hessian weights"
    source: ClassVar[str] = "arXiv 2603.00907"

    tau: float = Field(1e-3, ge=0.0, lt=1.0)

    def policy(self) -> MergePolicy:
        """Return the rule that merges neighbouring slots in pairs, with keys weighted by the formulas of this class."""
        return replace(super().policy(), weigh="hessian", tau=self.tau)
