"""AWQ's scales (arXiv 2306.00978): important channels are scaled up before rounding.

Channel j of a weight is multiplied by s_j before it is rounded, and the norm that produces the channel is divided by
s_j. The channel's relative rounding error gets smaller and nothing else changes.

    x W^T = (x / s) (W diag(s))^T        s_j = mean |x_j|^alpha / root of the largest times the smallest

From a few candidates, the alpha with the smallest squared error of the products on a text is taken, for all projections
of a norm; 0 means no scaling. Errors within a group still count by importance, which is that of the scaled inputs.
Scales of inputs that do not come from a norm would have to be folded into other projections, and would help little
(`benchmarks/awq_scales.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.export.weights.quantize import Floats, Rounded, rounded_values
from kvexport.tensor_files.casting import load_tensor
from kvexport.tensor_files.entry import TensorEntry

ALPHAS = tuple(i / 10 for i in range(10))
ROWS, TOKENS = 256, 512  # the most outputs of a projection, and the most tokens, whose errors are measured
LEAST = 1e-4  # of mean |x|
SUFFIX = ".awq"
"""The end of a tensor's name in the file. A projection's tensor has the scales of its inputs, [inputs]. A norm's
tensor, [2, inputs], has the factor of its weight, and the summand."""


@dataclass(frozen=True)
class ScaledNorm:
    """The weight of a norm whose projections have AWQ's scales.

    Attributes:
        entry: The norm's weight [inputs] in the checkpoint.
        factors: The bytes of [2, inputs] float32: the factor and the addend of each channel.
    """

    entry: TensorEntry
    factors: bytes
    packing: None = None

    @property
    def name(self) -> str:
        """The name of the norm's weight in the checkpoint."""
        return self.entry.name

    @property
    def shape(self) -> Any:
        """The shape [inputs] of the norm's weight."""
        return self.entry.shape

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the whole norm weight as one block: float32 [inputs], multiplied by the factors plus the addends."""
        factor, addend = np.frombuffer(self.factors, np.float32).reshape(2, -1)
        yield {"weight": load_tensor(self.entry, "float32") * factor + addend}

    def order(self) -> NDArray[np.int64]:
        """Raise NotImplementedError: the weight of a norm is a vector, without columns that could be reordered."""
        raise NotImplementedError


class Search:
    """A search for AWQ's exponent alpha: the squared rounding errors of every candidate, summed per norm.

    `note` adds the errors of one projection, when the model calls the projection.
    """

    def __init__(self, rounded: Mapping[str, Rounded]) -> None:
        self._rounded = rounded
        self._sizes: dict[str, Floats] = {}
        self._errors: dict[str, NDArray[np.float64]] = {}
        self._tensors: dict[str, list[str]] = {}
        self._unfit: set[str] = set()

    def note(self, norm: str, tensor: str, x: Floats, weight: Floats | None, importance: Floats | None) -> None:
        """Add the squared errors that each alpha causes in one projection that reads the output of a norm.

        Args:
            norm: The name of the norm's weight.
            tensor: The name of the projection's weight.
            x: The output of the norm [tokens, inputs].
            weight: The projection's weight [outputs, inputs]; None if it is not rounded.
            importance: The importance of its inputs; None if it is not rounded.
        """
        if weight is None or importance is None:
            self._unfit.add(norm)
            return
        size = self._sizes.setdefault(norm, np.maximum(np.abs(x).mean(0), np.float32(LEAST)))
        sample, rows = x[:: -(-len(x) // TOKENS)], weight[:: -(-len(weight) // ROWS)]
        of = self._rounded[tensor]
        errors = []
        for alpha in ALPHAS:
            scale = _scale(size, alpha)
            rounded = rounded_values(rows * scale, of.packing, importance / scale**2, positive=of.positive) / scale
            errors.append(float(np.square((rounded - rows) @ sample.T).mean()) * len(weight))
        self._errors[norm] = self._errors.get(norm, 0.0) + np.array(errors)
        self._tensors.setdefault(norm, []).append(tensor)

    def scales(self, offsets: Mapping[str, float], others: set[str]) -> dict[str, Floats]:
        """Return AWQ's scales with the least error, for each norm that only rounded projections read.

        Args:
            offsets: For each norm, by the name of its weight, c if the norm multiplies by (c + weight).
            others: The norms whose output is read by an operation other than a projection.

        Returns:
            The scales of the norms and of their projections, by their names in the file of importance.
        """
        scales_by_name: dict[str, Floats] = {}
        for norm in [norm for norm in self._tensors if norm in offsets and norm not in self._unfit | others]:
            scale = _scale(self._sizes[norm], ALPHAS[int(self._errors[norm].argmin())])
            scales_by_name |= {f"{tensor}{SUFFIX}": scale for tensor in self._tensors[norm]}
            scales_by_name[f"{norm}{SUFFIX}"] = np.stack([1 / scale, offsets[norm] * (1 / scale - 1)]).astype(
                np.float32
            )
        return scales_by_name


def _scale(size: Floats, alpha: float) -> Floats:
    scale = size ** np.float32(alpha)
    whole: Floats = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
    return whole
