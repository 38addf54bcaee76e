"""One lane at a moment, as a value: its state tensors and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Counters(NamedTuple):
    """What is counted of a lane. held: slots of each layer that were taken when it last merged (at most: a window may
    have dropped more). added: tokens since. length: tokens seen."""

    held: tuple[int, ...]
    added: int
    length: int


class Saved(NamedTuple):
    """A lane at a moment: its state tensors (see `ModelState.read`), which nobody may change, and its counters."""

    state: Mapping[str, NDArray[Any]]
    counters: Counters
