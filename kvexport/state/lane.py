"""The saved state of one lane (a row of the batch): its state tensors, such as the KV cache, and its counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

Pins = tuple[tuple[int, int], ...]


class Counters(NamedTuple):
    # Number of slots of each KV head of all layers that were occupied after the last merge. It is an upper bound,
    # because a sliding window may have dropped some since.
    held: tuple[int, ...]
    added: int  # tokens added since the last merge
    length: int  # tokens seen in all
    # Pinned tokens, which are never evicted: ranges of positions (first, end), in order and apart from each other. They
    # may be of prompt tokens that are still unread.
    pins: Pins = ()


def joined(pins: Iterable[tuple[int, int]]) -> Pins:
    """Return ranges (first, end) of never-evicted positions in order: empty ones left out, touching ones joined."""
    result: list[tuple[int, int]] = []
    for first, end in sorted(pins):
        if first >= end:
            continue
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((first, end))
    return tuple(result)


def within(pins: Pins, first: int, end: int) -> Pins:
    """Return the ranges of never-evicted positions, cut to first <= position < end."""
    return joined((max(a, first), min(b, end)) for a, b in pins)


def pinned(pins: Pins) -> int:
    return sum(end - first for first, end in pins)


class Saved(NamedTuple):
    """A saved lane (row of the batch) at one moment: its state tensors, which nobody may change, and its counters."""

    state: Mapping[str, NDArray[Any]]
    counters: Counters
