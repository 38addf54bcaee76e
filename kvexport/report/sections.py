"""What a report is made of: plain data, and its cells as text."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from kvexport.report.axes import format_number

Cell = str | int | float | None
Flag = Literal["good", "bad"]
Highlight = Callable[[int, int], Flag | None] | Mapping[tuple[int, int], Flag] | Set[tuple[int, int]]


@dataclass(frozen=True)
class Table:
    """Rows of one cell per column (else ValueError). `highlight` flags (row, column), counted from 0; the members of a
    bare set are bad."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    highlight: Highlight = frozenset[tuple[int, int]]()

    def __post_init__(self) -> None:
        if wrong := [(i, len(row)) for i, row in enumerate(self.rows) if len(row) != len(self.columns)]:
            raise ValueError(
                f"table {self.title!r}: row {wrong[0][0]} has {wrong[0][1]} cells for {len(self.columns)} columns"
            )


@dataclass(frozen=True)
class Series:
    """`y` at `x` and the ends of a band (one alone reaches to the line), as many of each (else ValueError); None or NaN
    is a gap."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None

    def __post_init__(self) -> None:
        if len({len(values) for values in (self.x, self.y, self.low, self.high) if values is not None}) > 1:
            raise ValueError(f"series {self.name!r}: x, y, low and high differ in length")


@dataclass(frozen=True)
class Plot:
    """Lines over common axes. What an axis cannot show (NaN, infinity, zero on a logarithmic one) is left out and
    counted in the note.
    x_also, y_also: values that the axes reach too, so that plots can share them."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    note: str = ""
    x_also: tuple[float, ...] = ()
    y_also: tuple[float, ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """`values[row][column]`, one per y and x tick (else ValueError), rows from the top; `low` and `high` end the scale
    (None: the data)."""

    title: str
    x_label: str
    y_label: str
    x_ticks: Sequence[Cell]
    y_ticks: Sequence[Cell]
    values: Sequence[Sequence[float | None]]
    low: float | None = None
    high: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if [len(row) for row in self.values] != [len(self.x_ticks)] * len(self.y_ticks):
            raise ValueError(
                f"heat map {self.title!r}: values are not {len(self.y_ticks)} rows (y ticks) of {len(self.x_ticks)} "
                "(x ticks)"
            )


@dataclass(frozen=True)
class KeyValues:
    """Names and their values, in the mapping's order."""

    title: str
    mapping: Mapping[str, Cell]


@dataclass(frozen=True)
class Paragraph:
    """Running text; an empty line starts a new paragraph."""

    text: str


Section = Table | Plot | HeatMap | KeyValues | Paragraph


def plain(value: object) -> str:
    """One line of text, valid in XML and harmless on a terminal: control characters and lone surrogates become
    U+FFFD."""
    text = format_number(value) if value is None or isinstance(value, Real) else str(value)  # type: ignore[arg-type]
    return re.sub("[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", " ".join(text.split()))


def escape(value: object) -> str:
    """`plain`, for HTML."""
    return html.escape(plain(value), quote=True)


def flag_of(table: Table, row: int, column: int) -> Flag | None:
    """Of one cell."""
    if isinstance(table.highlight, Set):
        return "bad" if (row, column) in table.highlight else None
    return table.highlight.get((row, column)) if isinstance(table.highlight, Mapping) else table.highlight(row, column)


def numeric_columns(table: Table) -> list[bool]:
    """Of every column whether it has a number."""
    columns = ([row[column] for row in table.rows] for column in range(len(table.columns)))
    return [any(isinstance(value, Real) and not isinstance(value, bool) for value in column) for column in columns]
