"""What a call of the decoder gives: rows of logits, and the largest logits of each where the rows stay on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

# Relative: a device adds float32 numbers in an order of its own, a thread at most some hundred one after the other
MASS_ERROR = 1e-4


@dataclass(frozen=True)
class TopLogits:
    """The n largest logits of a row of `vocabulary`. ids, values: [n], the values descending; every other logit is at
    most the last of them.
    mass: sum of exp(logit - largest logit) over the whole row, within MASS_ERROR."""

    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    mass: float
    vocabulary: int


class Rows(Protocol):
    """The logits of a call's lanes, numbered from the call's first lane, until the next call."""

    def top_logits(self, lane: int) -> TopLogits | None:
        """The largest logits; None where the whole row is in the host's memory already."""
        ...

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """All logits [vocabulary], copied to the host where they are not there."""
        ...


@dataclass(frozen=True)
class HostRows:
    """Logits [lanes, vocabulary] in the host's memory."""

    logits: npt.NDArray[np.float32]

    def top_logits(self, lane: int) -> None:
        """None: there is nothing to save."""

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """See `Rows.row`."""
        row: npt.NDArray[np.float32] = self.logits[lane]
        return row
