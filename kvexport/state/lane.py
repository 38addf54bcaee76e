"""The saved state of one lane (a row of the batch): its state tensors, such as the KV cache, and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Counters(NamedTuple):
    # Number of slots of each KV head of all layers that were occupied after the last merge. It is an upper bound,
    # because a sliding window may have dropped some since.
    held: tuple[int, ...]
    added: int  # tokens added since the last merge
    length: int  # tokens seen in all


class Saved(NamedTuple):
    """A saved lane (row of the batch) at one moment: its state tensors, which nobody may change, and its counters."""

    state: Mapping[str, NDArray[Any]]
    counters: Counters
