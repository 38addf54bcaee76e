"""Reading of untrusted JSON of a client or a model, with bounds on the number, nesting depth and size of its values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic_core import from_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_VALUES = 250_000  # values and keys; reading as many takes at most 0.1 s, in which nothing else runs
_STRUCTURE = b",:[{"


class TooManyValues(ValueError):
    def __init__(self, most: int) -> None:
        super().__init__(f"more than {most} JSON values and keys")


def read_json(text: str | bytes, most: int = MOST_VALUES, *, cut: bool = False) -> Any:
    data = text.encode() if isinstance(text, str) else text
    if count_values(data, most) > most:
        raise TooManyValues(most)
    partial: Literal["off", "trailing-strings"] = "trailing-strings" if cut else "off"
    value = from_json(data, allow_inf_nan=False, cache_strings="none", allow_partial=partial)
    if not _finite(value):
        raise ValueError("a number is too large")
    return value


def count_values(data: bytes, most: int = MOST_VALUES) -> int:
    """Return an upper bound of the number of values and keys in a JSON text; the exact number if it is above `most`.

    A parser creates a Python object for each value and key, and holds the interpreter's lock meanwhile. This function
    counts the values and keys beforehand with NumPy, which releases the lock, so that a reader can refuse too many.
    """
    upper = 1 + sum(data.count(character) for character in _STRUCTURE)
    if upper <= most:
        return upper
    text = np.frombuffer(data, np.uint8)
    quotes = text == ord('"')
    if b"\\" in data:
        quotes[_escaped(text)] = False
    outside = np.cumsum(quotes, dtype=np.uint8) % 2 == 0  # an even number of quotes stands before
    structure = np.zeros(len(text), bool)
    for character in _STRUCTURE:
        structure |= text == character
    return 1 + int(np.count_nonzero(structure & outside))


def _escaped(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the indices of the characters that follow an escaping backslash, in a JSON text [n] uint8."""
    slashes = np.flatnonzero(text == ord("\\"))
    order = np.arange(len(slashes))
    starts = np.ones(len(slashes), bool)  # of runs of backslashes
    np.not_equal(slashes[1:], slashes[:-1] + 1, out=starts[1:])
    in_run = order - np.maximum.accumulate(np.where(starts, order, 0))
    escaped: NDArray[np.int64] = slashes[in_run % 2 == 0] + 1
    return escaped[escaped < len(text)]


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, list) else True
