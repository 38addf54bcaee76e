"""The result of a decoder call: rows of logits, and the largest logits of each row if the rows stay on a GPU."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

# The largest relative error of `TopLogits.mass`. A GPU adds float32 numbers in its own order, and each of its threads
# adds at most a few hundred of them.
MASS_ERROR = 1e-4


@dataclass(frozen=True)
class TopLogits:
    """The n largest logits of a row (one token's logits over the vocabulary), with their token ids.

    Attributes:
        ids: [n] token ids.
        values: [n] logits, descending. Every logit that is not listed is at most the last of these.
        mass: The sum of exp(logit - largest logit) over the whole row, with a relative error of at most MASS_ERROR.
        vocabulary: The number of logits in the row.
    """

    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    mass: float
    vocabulary: int

    @property
    def token(self) -> int:
        """The token of the largest logit; the lowest id if several logits are equally large."""
        return int(self.ids[self.values == self.values[0]].min())


class Rows(Protocol):
    """The logits that one decoder call returned. Lane 0 is the first batch lane of that call."""

    def top_logits(self, lane: int) -> TopLogits | None:
        """Return the n largest logits of a batch lane with token ids; None if all logits are in host memory."""
        ...

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """Return all logits [vocabulary] of a batch lane, copied to host memory if they are on a device."""
        ...


@dataclass(frozen=True)
class HostRows:
    """Logits [lanes, vocabulary] of a decoder call in host memory; a lane is a row of the batch."""

    logits: npt.NDArray[np.float32]

    def top_logits(self, lane: int) -> None:
        """Return None, because all logits of the batch lane are in host memory."""

    def row(self, lane: int) -> npt.NDArray[np.float32]:
        """Return all logits [vocabulary] of a batch lane."""
        row: npt.NDArray[np.float32] = self.logits[lane]
        return row
