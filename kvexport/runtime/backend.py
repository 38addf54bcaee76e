"""What an artifact's engine gives whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan
from kvexport.runtime.lanes import Backend


class EngineBackend(Backend, Protocol):
    """A `Backend` whose state, wherever it is, can be read and written."""

    def get_state(self) -> dict[str, NDArray[Any]]:
        """A copy of every state tensor, by its input name."""
        ...

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Take over a state, and the tokens that each lane has seen [lanes, 1]."""
        ...


class Sessions(Protocol):
    """What runs the graphs of one artifact, holding the weights once, however many backends use it. all_logits: of every token of a call,
    or of the last."""

    all_logits: bool

    def backend(self, plan: CachePlan, lanes: int) -> EngineBackend:
        """State for `lanes` sequences, all empty."""
        ...
