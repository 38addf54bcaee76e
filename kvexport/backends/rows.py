"""The result of a decoder call: rows of logits, and the largest logits of each row if rows stay on a device."""

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
    """The n largest logits of a row.

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


class Rows(Protocol):
    """The logits of a call's lanes, numbered from the call's first lane, valid until the next call."""

    def top_logits(self, lane: int) -> TopLogits | None:
        """Return the largest logits of a lane; None if the whole row is already in the host's memory."""
        ...

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """Return all logits of a lane, [vocabulary], copied to the host if they are on a device."""
        ...


@dataclass(frozen=True)
class HostRows:
    """Logits [lanes, vocabulary] in the host's memory."""

    logits: npt.NDArray[np.float32]

    def top_logits(self, lane: int) -> None:
        """Return None, because the whole row is in the host's memory."""

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """Return all logits of a lane, [vocabulary]."""
        row: npt.NDArray[np.float32] = self.logits[lane]
        return row
