"""What an artifact's engine gives whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan
from kvexport.runtime.lanes import Backend
from kvexport.runtime.top_logits import Rows


class EngineBackend(Backend, Protocol):
    """A `Backend` whose state, wherever it is, can be read and written. candidates: how many of a row `step` gives; 0
    where the artifact has no graph for them; None where logits are in the host's memory."""

    candidates: int | None

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64]) -> Rows:
        """As `decode` with one token of each lane [lanes, 1], but the logits stay where they are. Needs
        `candidates`."""
        ...

    def get_state(self) -> dict[str, NDArray[Any]]:
        """A copy of every state tensor, by its input name."""
        ...

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Take over a state, and the tokens that each lane has seen [lanes, 1]."""
        ...


class Sessions(Protocol):
    """What runs the graphs of one artifact, holding the weights once, however many backends use it. all_logits: of
    every token of a call, or of the last."""

    all_logits: bool

    def backend(self, plan: CachePlan, lanes: int) -> EngineBackend:
        """State for `lanes` sequences, all empty."""
        ...
