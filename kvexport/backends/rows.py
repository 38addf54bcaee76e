"""The result of a decoder call: rows of logits, and the largest logits of each row if the rows stay on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

# The relative error of `TopLogits.mass`. A device adds float32 numbers in its own order, each thread at most some
# hundred.
MASS_ERROR = 1e-4


@dataclass(frozen=True)
class TopLogits:
    """The n largest logits of a row (one token's logits over the vocabulary), with their token ids.

    Attributes:
        ids: [n] token ids.
        values: [n] logits, descending. Every other logit is at most the last of them.
        mass: The sum of exp(logit - largest logit) over the whole row, with a relative error of at most MASS_ERROR.
        vocabulary: The number of logits in the row.
    """

    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    mass: float
    vocabulary: int

    @property
    def token(self) -> int:
        """The lowest id of the largest logit."""
        return int(self.ids[self.values == self.values[0]].min())


class Rows(Protocol):
    """The logits that one decoder call returned. Lanes are numbered from the call's first lane."""

    def top_logits(self, lane: int) -> TopLogits | None:
        """Return the n largest logits of a lane with their token ids; None if all logits are already in host memory."""
        ...

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """Return all logits [vocabulary] of a lane, copied to host memory if they are on a device."""
        ...


@dataclass(frozen=True)
class HostRows:
    """Logits [lanes, vocabulary] of a decoder call in host memory."""

    logits: npt.NDArray[np.float32]

    def top_logits(self, lane: int) -> None:
        """Return None, because all logits of the lane are in host memory."""

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """Return all logits [vocabulary] of a lane."""
        row: npt.NDArray[np.float32] = self.logits[lane]
        return row
