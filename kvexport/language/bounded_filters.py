"""Jinja filters for chat templates, with a bound on numbers that decide how much text a filter returns.

minijinja's own filters allocate as much memory as a template asks for, and the process dies if memory is short.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MOST = 1000
_NUMBER = re.compile(r"\d+")


def check_width(value: Any) -> None:
    """Check that a width or count which a chat template passes to a Jinja filter is at most 1000."""
    if (isinstance(value, int) and value > MOST) or (isinstance(value, str) and len(value) > MOST):
        raise ValueError(f"a width or count of {str(value)[:40]} is larger than {MOST}")


def format_text(value: Any, *arguments: Any, **named: Any) -> str:
    text = str(value)
    for number in _NUMBER.findall(text):
        if len(number) > 4 or int(number) > MOST:
            check_width(MOST + 1)
    if "*" in text and "%" in text:
        raise ValueError("a width that is an argument is not supported")
    return text % (named or arguments)


def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_width(width)
    space = width if isinstance(width, str) else " " * width
    lines = str(value).split("\n")
    rest = [space + line if line or blank else line for line in lines[1:]]
    return "\n".join([(space if first else "") + lines[0], *rest])


def batch(value: Any, linecount: int, fill_with: Any = None) -> list[list[Any]]:
    check_width(linecount)
    items, rows = list(value), []
    for start in range(0, len(items), max(1, linecount)):
        row = items[start : start + max(1, linecount)]
        rows.append(row if fill_with is None else row + [fill_with] * (linecount - len(row)))
    return rows


def slices(value: Any, count: int, fill_with: Any = None) -> list[list[Any]]:
    check_width(count)
    items = list(value)
    if count < 1:
        raise ValueError(f"slice: the count is {count}, expected at least 1")
    each, longer = divmod(len(items), count)
    rows, start = [], 0
    for i in range(count):
        end = start + each + (i < longer)
        row = items[start:end]
        rows.append([*row, fill_with] if fill_with is not None and i >= longer > 0 else row)
        start = end
    return rows


FILTERS: Mapping[str, Callable[..., Any]] = {"format": format_text, "indent": indent, "batch": batch, "slice": slices}
