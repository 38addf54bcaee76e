"""A report as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from kvexport.report.sections import KeyValues, Paragraph, Section, Table, numeric_columns, plain


def render_text(sections: Sequence[Section]) -> str:
    """Return a report as text with aligned columns. Bad cells are marked by "! ". Plots are left out."""
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
