"""The sections of a report (tables, plots, text) as plain data, and the text of their cells."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]  # rows with one cell per column
    note: str = ""  # text below the table
    bad: Set[tuple[int, int]] = frozenset()  # cells that are marked, by (row, column) from 0

    def __post_init__(self) -> None:
        if wrong := [(i, len(row)) for i, row in enumerate(self.rows) if len(row) != len(self.columns)]:
            raise ValueError(
                f"table {self.title!r}: row {wrong[0][0]} has {wrong[0][1]} cells for {len(self.columns)} columns"
            )


@dataclass(frozen=True)
class Series:
    name: str  # name in the legend
    x: Sequence[float | None]  # places of the points
    y: Sequence[float | None]  # values of the points. None or NaN is a gap.
    low: Sequence[float | None] | None = None  # lower ends of a band; None means that the band ends at the line
    high: Sequence[float | None] | None = None  # upper ends of a band; None means that the band ends at the line

    def __post_init__(self) -> None:
        if len({len(values) for values in (self.x, self.y, self.low, self.high) if values is not None}) > 1:
            raise ValueError(f"series {self.name!r}: x, y, low and high differ in length")


@dataclass(frozen=True)
class Plot:
    """A plot of a report: lines over common axes.

    Points that an axis cannot show (NaN, infinity, zero on a logarithmic axis) are left out, and counted in the note
    below the plot.
    """

    title: str
    x_label: str  # label of the x axis
    y_label: str  # label of the y axis
    series: Sequence[Series]  # lines
    x_log: bool = False  # whether the x axis is logarithmic
    y_log: bool = False  # whether the y axis is logarithmic
    note: str = ""  # text below the plot
    x_also: tuple[float, ...] = ()  # further values that the x axis includes, so that several plots can have equal axes
    y_also: tuple[float, ...] = ()  # further values that the y axis includes


@dataclass(frozen=True)
class KeyValues:
    title: str
    mapping: Mapping[str, Cell]


@dataclass(frozen=True)
class Paragraph:
    text: str


Section = Table | Plot | KeyValues | Paragraph


def format_number(value: float | None) -> str:
    """Return a number as text for a report; None becomes a dash.

    An integer is written in full. A float has 4 significant digits. A float is rounded to an integer from 1,000 on, and
    is in scientific notation below 1e-4 and from 1e7 on.
    """
    if value is None or isinstance(value, bool):
        return {None: "\N{EN DASH}", True: "yes", False: "no"}[value]
    if isinstance(value, Integral) or 1000 <= abs(value) < 1e7:
        return f"{round(value):,}" if abs(value) >= 9_999.5 else f"{round(value)}"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(float(value))
    return f"{float(value):.4g}" if 1e-4 <= abs(value) < 1e7 else _scientific(value, 3)


def _scientific(value: float, digits: int) -> str:
    """Return a number in scientific notation with at most `digits` digits after the point, such as 1.5e-7."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def plain(value: object) -> str:
    """Return a value as one line of text that is valid in XML and harmless on a terminal.

    Control characters and lone surrogates become U+FFFD.
    """
    text = format_number(value) if value is None or isinstance(value, Real) else str(value)  # type: ignore[arg-type]
    return re.sub("[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", " ".join(text.split()))


def escape(value: object) -> str:
    return html.escape(plain(value), quote=True)


def numeric_columns(table: Table) -> list[bool]:
    columns = ([row[column] for row in table.rows] for column in range(len(table.columns)))
    return [any(isinstance(value, Real) and not isinstance(value, bool) for value in column) for column in columns]
