"""The sections of a report (tables, figures, text) as plain data, and their text for a terminal."""

from __future__ import annotations

import math
import re
import textwrap
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
class KeyValues:
    title: str
    mapping: Mapping[str, Cell]


@dataclass(frozen=True)
class Paragraph:
    text: str


Section = Table | KeyValues | Paragraph


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
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def plain(value: object) -> str:
    """Return a value as one line of text that is valid in XML and harmless on a terminal.

    Control characters and lone surrogates become U+FFFD.
    """
    text = format_number(value) if value is None or isinstance(value, Real) else str(value)  # type: ignore[arg-type]
    return re.sub("[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", " ".join(text.split()))


def numeric_columns(table: Table) -> list[bool]:
    columns = ([row[column] for row in table.rows] for column in range(len(table.columns)))
    return [any(isinstance(value, Real) and not isinstance(value, bool) for value in column) for column in columns]


def render_text(sections: Sequence[Section]) -> str:
    """Return a report as text with aligned columns. Bad cells are marked by "! "."""
    blocks: list[list[str]] = []
    for section in sections:
        if isinstance(section, Table):
            rows = [
                ["! " * ((r, c) in section.bad) + plain(value) for c, value in enumerate(row)]
                for r, row in enumerate(section.rows)
            ]
            head, *lines = _aligned([list(map(plain, section.columns)), *rows], numeric_columns(section))
            blocks.append(
                [plain(section.title), head, "-" * max(map(len, [head, *lines])), *lines, plain(section.note)]
            )
        elif isinstance(section, KeyValues):
            pairs = [["", plain(key), plain(value)] for key, value in section.mapping.items()]
            blocks.append([plain(section.title), *_aligned(pairs, [False] * 3)])
        elif isinstance(section, Paragraph):
            blocks += [textwrap.wrap(plain(text), 100) for text in section.text.split("\n\n") if text.strip()]
    return "\n".join("".join(f"{line}\n" for line in block if line) for block in blocks)


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [f"{text:{'>' if side else '<'}{width}}" for text, width, side in zip(row, widths, right, strict=True)]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in padded]
