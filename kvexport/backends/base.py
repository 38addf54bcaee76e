"""What the engine drives, whatever runs an artifact's graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.rows import Rows
from kvexport.cache import CachePlan


class LaneState(Protocol):
    """State tensors of a fixed number of lanes, and the two graphs that advance them."""

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append [n, T] tokens to lanes first <= lane < first + n, of which the first query_length [n, 1] are real; the
        other lanes take no part. Logits [n, 1 or T, vocabulary]. All three arrays may be overwritten by the next
        call."""
        ...

    def merge(self, first: int, last: int) -> None:
        """Bring lanes first <= lane < last back within their budgets."""
        ...

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Empty lanes first <= lane < last. poisoned: they may hold NaN, so that no value of theirs may stay."""
        ...


class ModelState(LaneState, Protocol):
    """A `LaneState` that can be read and written, wherever it is. top_logits: how many of a row `step` gives; 0 where
    the artifact has no graph for them; None where logits are in the host's memory."""

    top_logits: int | None

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """As `decode` with one token of each lane [n, 1], but the logits stay where they are. Needs `top_logits`."""
        ...

    def get_state(self) -> dict[str, NDArray[Any]]:
        """A copy of every state tensor, by its input name."""
        ...

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Take over a state, and the tokens that each lane has seen [n, 1]; of n lanes, which become the first."""
        ...


class Sessions(Protocol):
    """What runs the graphs of one artifact, holding the weights once, however many states use it. all_logits: of every
    token of a call, or of the last."""

    all_logits: bool

    def backend(self, plan: CachePlan, lanes: int) -> ModelState:
        """State for `lanes` sequences, all empty."""
        ...
