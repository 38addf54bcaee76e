"""The PyTorch reference with the interface of a `LaneState` (KV caches of a batch and calls that advance them)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.model_state import LaneState
from kvexport.plan.cache import CachePlan

if TYPE_CHECKING:
    from kvexport.validate.reference import TorchReference
    from kvexport.validate.telemetry import Telemetry


class ReferenceBackend(LaneState):
    """KV caches of a batch whose decode and merge calls are computed by the PyTorch reference (a `LaneState`)."""

    # If not None, each call stores the hidden state at the start of every layer here, by layer
    hidden: dict[int, NDArray[Any]] | None = None

    def __init__(
        self, reference: TorchReference, plan: CachePlan, lanes: int, telemetry: Telemetry | None = None
    ) -> None:
        self.reference, self.telemetry = reference, telemetry
        self.state = {
            name: np.zeros(layer.shapes(lanes)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in plan.state_names()
        }
        self.length = np.zeros((lanes, 1), dtype=np.int64)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append tokens to all lanes by the PyTorch reference, and return logits. See `LaneState.decode`."""
        assert first == 0 and len(input_ids) == len(self.length), "a reference runs all its lanes"
        feed = {"input_ids": input_ids, "query_length": query_length, "past_length": self.length, **self.state}
        present = self.reference.decode(feed, self.telemetry, self.hidden)
        self.decoded(feed, present)
        self.length = present["present_length"]
        self._take(present, slice(None))
        logits: NDArray[np.float32] = present["logits"]
        return logits

    def merge(self, first: int, last: int) -> None:
        """Compress the KV cache of each lane first <= lane < last to its budget, by the PyTorch reference."""
        feed = {name: array[first:last] for name, array in self.state.items()}
        present = self.reference.merge(feed)
        self.merged(feed, present, first)
        if self.telemetry:
            self.telemetry.merged(first, feed, present)
        self._take(present, slice(first, last))

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Raise an error: the batch lanes of a reference run are never used twice."""
        raise AssertionError("a reference runs once")

    def decoded(self, feed: dict[str, NDArray[Any]], present: dict[str, NDArray[Any]]) -> None:
        """Receive the inputs and outputs of each decoder call before the state is updated; a hook for subclasses."""

    def merged(self, feed: dict[str, NDArray[Any]], present: dict[str, NDArray[Any]], first: int) -> None:
        """Receive the KV caches before (`feed`) and after (`present`) a merge of lanes from `first` on.

        A hook for subclasses.
        """

    def _take(self, present: dict[str, NDArray[Any]], lanes: slice) -> None:
        for name, array in present.items():
            if name.startswith("present."):
                self.state[name.replace("present.", "past_key_values.")][lanes] = array
