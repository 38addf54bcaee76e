"""One lane at a moment, as a value: its state tensors and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Counters(NamedTuple):
    """Counters of one lane.

    Attributes:
        held: Slots of each layer that were occupied after the last merge. It is an upper bound: a sliding window may
            have dropped more.
        added: Tokens added since the last merge.
        length: Tokens seen in all.
    """

    held: tuple[int, ...]
    added: int
    length: int


class Saved(NamedTuple):
    """The state tensors (see `ModelState.read`) and the counters of a lane at a moment. Nobody may change them."""

    state: Mapping[str, NDArray[Any]]
    counters: Counters
