"""Batch lanes whose calls and merges are those of validation's PyTorch reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.model_state import LaneState
from kvexport.validate.reference import TorchReference


class ReferenceState(LaneState):
    def __init__(self, reference: TorchReference, lanes: int) -> None:
        self.reference = reference
        self.clear(0, lanes)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        assert first == 0, "all lanes are cleared together"
        self.state = {
            name: np.zeros(layer.shapes(last)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in self.reference.plan.state_names()
        }
        self.length = np.zeros((last, 1), dtype=np.int64)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        assert len(input_ids) == len(self.length), "a reference runs all its lanes"
        feed = {"input_ids": input_ids, "query_length": query_length, "past_length": self.length, **self.state}
        present = self.reference.decode(feed)
        self.length = self.length + query_length
        self._take(present, slice(None))
        logits: NDArray[np.float32] = present["logits"]
        return logits

    def merge(self, first: int, last: int) -> None:
        self._take(self.reference.merge({name: x[first:last] for name, x in self.state.items()}), slice(first, last))

    def _take(self, present: dict[str, NDArray[Any]], lanes: slice) -> None:
        for name, array in present.items():
            if name.startswith("present."):
                self.state[name.replace("present.", "past_key_values.")][lanes] = array
