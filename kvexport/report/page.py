"""A report from plain data: one self-contained HTML page, or its tables as text. The page fetches nothing and runs no
script."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from typing import Literal

from kvexport.report.axes import TINY, axis_of, format_number

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
_Point = tuple[float, float, float, float]  # x, y and the band's ends

SHAPES = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-4-4h8v8h-8z", "M0-5L5 4H-5z", "M0-6L5 0 0 6-5 0z", "M0 5L5-4H-5z")
SCALE = (
    (0, 34, 78),
    (66, 78, 108),
    (125, 124, 120),
    (188, 174, 108),
    (254, 232, 56),
)  # cividis: needs no colour vision
# Drawings are laid out for 14 px text (GLYPH: the width of a digit of it) and never shown below 0.7 of that: 10 px on a
# telephone.
WIDTH, HEIGHT, GLYPH, SMALLEST = 480.0, 290.0, 8.2, 0.7
BIG = 1e100  # larger numbers are not drawn
# The series are Okabe and Ito's colours, which stay apart for colour-blind readers, without yellow; those with a
# contrast below 3 are
# shifted in lightness. 7 colours and 5 shapes: the 36th series is the first to look like another. Dark is for screens:
# paper is white.
STYLE = """:root{color-scheme:light dark;--bg:#ffffff;--fg:#1b1f24;--mute:#57606a;--rule:#c3cad2;--grid:#e4e8ec;
--stripe:#f5f7f9;--good:#00614a;--good-bg:#dff3ec;--bad:#9a3a00;--bad-bg:#fdeadd;
--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#c2659a;--s4:#bd8200;--s5:#2f97d3;--s6:#1b1f24}
@media screen and (prefers-color-scheme:dark){:root{--bg:#15181d;--fg:#e6e9ec;--mute:#a3acb6;--rule:#465059;
--grid:#2a3037;--stripe:#1b1f25;--good:#5fd3ac;--good-bg:#12322a;--bad:#ff9d66;--bad-bg:#3d2314;
--s0:#0a7fc2;--s1:#d55e00;--s2:#009e73;--s3:#cc79a7;--s4:#e69f00;--s5:#56b4e9;--s6:#e6e9ec}}
html{-webkit-text-size-adjust:100%;print-color-adjust:exact;-webkit-print-color-adjust:exact}.note:empty{display:none}
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:80rem;box-sizing:border-box;background:var(--bg);color:var(--fg);
font:1rem/1.5 system-ui,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:0}h2{font-size:1.1rem;line-height:1.3;margin:0 0 .5rem}
dd,dl,figure{margin:0}
header{border-bottom:2px solid var(--rule);padding-bottom:.75rem}.note,.axis,dt{color:var(--mute)}
.note,.axis{margin:.3rem 0 0}
.note,.axis,.legend{font-size:.875rem}section,.figures{margin:2rem 0 0}.text p{max-width:48rem;margin:0 0 .75rem}
.scroll{overflow-x:auto}
table,dl{font-size:.9375rem;font-variant-numeric:tabular-nums}table{border-collapse:collapse;overflow-wrap:break-word}
th,td{padding:.3rem .75rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);max-width:28rem}
th{vertical-align:bottom;border-bottom:2px solid var(--mute)}tbody tr:nth-child(even){background:var(--stripe)}
.num{text-align:right}
td.num{white-space:nowrap}.good{font-weight:600;color:var(--good);background:var(--good-bg)}
.bad{font-weight:600;color:var(--bad);background:var(--bad-bg)}
dl{display:grid;grid-template-columns:fit-content(45%) 1fr;gap:.2rem 1rem}
.figures{display:grid;gap:2rem 2.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr))}
figure{min-width:0;max-width:44rem}figure.wide{grid-column:1/-1;max-width:none}.axis.x{text-align:right}
.legend svg{flex:none}.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;margin:0;padding:0}
.legend li{display:flex;align-items:center;gap:.4rem}
.drawing text{font-size:14px;fill:var(--mute);font-variant-numeric:tabular-nums;text-anchor:middle}
.drawing .end{text-anchor:end}
.grid{stroke:var(--grid)}.frame{stroke:var(--mute);fill:none}.dot{fill:currentColor;stroke:var(--bg)}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}.drawing{display:block;width:100%;height:auto}
.band{fill:currentColor;fill-opacity:.17;stroke:currentColor;stroke-opacity:.4}
.drawing .pale{fill:#fff}.drawing .deep{fill:#000}
.none{fill:var(--stripe);stroke:var(--rule)}@media(min-width:600px){body{padding:2rem 2rem 4rem}
.drawing text{font-size:11px}}
@media print{body{max-width:none;padding:0;font-size:10pt}figure,tr{break-inside:avoid}h2{break-after:avoid}
.scroll{overflow:visible}.drawing{min-width:0!important}}"""


def _plain(value: object) -> str:
    """One line of text, valid in XML and harmless on a terminal: control characters and lone surrogates become
    U+FFFD."""
    text = format_number(value) if value is None or isinstance(value, Real) else str(value)  # type: ignore[arg-type]
    return re.sub("[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", " ".join(text.split()))


def _escape(value: object) -> str:
    return html.escape(_plain(value), quote=True)


def render_html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page as one string; the same input gives the same page. Every text is escaped; nothing outside the page is
    referred to."""
    body = ""
    # Drawings that follow one another share a grid: side by side where the window is wide.
    for drawn, group in groupby(sections, key=lambda section: isinstance(section, Plot | HeatMap)):
        parts = "".join(f"{_section(section)}\n" for section in group)
        body += f'<div class="figures">\n{parts}</div>\n' if drawn else parts
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{_escape(title)}</title>
<style>{STYLE}</style></head>
<body><header><h1>{_escape(title)}</h1><p class="note">{_escape(subtitle)}</p></header>
<main>
{body}</main></body></html>
"""


def _section(section: Section) -> str:
    if isinstance(section, Plot | HeatMap):
        return _plot(section) if isinstance(section, Plot) else _heat_map(section)
    if isinstance(section, Table):
        return f"<section>\n{_table(section)}\n</section>"
    if isinstance(section, KeyValues):
        pairs = "\n".join(f"<dt>{_escape(key)}</dt><dd>{_escape(value)}</dd>" for key, value in section.mapping.items())
        return f"<section>\n<h2>{_escape(section.title)}</h2>\n<dl>\n{pairs}\n</dl>\n</section>"
    paragraphs = "\n".join(f"<p>{_escape(text)}</p>" for text in section.text.split("\n\n") if text.strip())
    return f'<section class="text">\n{paragraphs}\n</section>'


def _flag(table: Table, row: int, column: int) -> Flag | None:
    if isinstance(table.highlight, Set):
        return "bad" if (row, column) in table.highlight else None
    return table.highlight.get((row, column)) if isinstance(table.highlight, Mapping) else table.highlight(row, column)


def _numeric(table: Table) -> list[bool]:
    columns = ([row[column] for row in table.rows] for column in range(len(table.columns)))
    return [any(isinstance(value, Real) and not isinstance(value, bool) for value in column) for column in columns]


def _table(table: Table) -> str:
    sides = ["num " if numeric else "" for numeric in _numeric(table)]
    head = "".join(
        f'<th scope="col" class="{side}">{_escape(name)}</th>' for side, name in zip(sides, table.columns, strict=True)
    )
    rows = []
    for r, row in enumerate(table.rows):
        cells = ""
        for c, value in enumerate(row):
            flag = _flag(table, r, c) or ""
            # The mark says without colour what the colour says, and stands first so that digits stay in line.
            mark = f'<span role="img" aria-label="{flag}">{"✓" if flag == "good" else "✗"}</span> ' if flag else ""
            cells += f'<td class="{sides[c]}{flag}">{mark}{_escape(value)}</td>'
        rows.append(f"<tr>{cells}</tr>")
    body = "\n".join(rows) or f'<tr><td colspan="{len(sides) or 1}">no rows</td></tr>'
    grid = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    title, note = _escape(table.title), _escape(table.note)
    return f'<h2>{title}</h2>\n<div class="scroll" tabindex="0">\n{grid}\n</div>\n<p class="note">{note}</p>'


def _points(plot: Plot, series: Series, left_out: Counter[str]) -> list[_Point | None]:
    """None where a point cannot be drawn; `left_out` counts why."""
    points: list[_Point | None] = []
    given = [
        [None] * len(series.x) if values is None else values for values in (series.x, series.y, series.low, series.high)
    ]
    for x, y, low, high in (
        [math.nan if value is None else float(value) for value in point] for point in zip(*given, strict=True)
    ):
        why = "" if abs(x) < BIG and abs(y) < BIG else "not a finite number"
        if (plot.x_log and x < TINY) or (plot.y_log and y < TINY):
            why = "at or below zero, which a logarithmic axis cannot show"
        points.append(None if why else (x, y, low if abs(low) < BIG else y, high if abs(high) < BIG else y))
        left_out.update([why] if why else [])
    return points


def _plot(plot: Plot) -> str:
    left_out: Counter[str] = Counter()
    found = [_points(plot, series, left_out) for series in plot.series]
    shown = [point for points in found for point in points if point]
    y_values = [v for v in (*(v for p in shown for v in p[1:]), *plot.y_also) if v >= TINY or not plot.y_log]
    y_axis = axis_of(y_values, plot.y_log, lambda labels: len(labels) <= 9)
    left, top, bottom = max(map(len, y_axis.labels)) * GLYPH + 12, 10.0, HEIGHT - 26
    x_values = [*(p[0] for p in shown), *plot.x_also]
    x_axis = axis_of(x_values, plot.x_log, lambda all_: (max(map(len, all_)) + 1.5) * GLYPH * len(all_) <= WIDTH - left)
    right = WIDTH - max(len(x_axis.labels[-1]) * GLYPH / 2, 10)

    def at(x: float, y: float) -> str:
        return f"{left + (right - left) * x_axis.place(x):.1f} {bottom - (bottom - top) * y_axis.place(y):.1f}"

    parts = [] if shown else [f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT / 2}">no data</text>']
    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True) if shown else ():
        place = at(x_axis.ticks[0], tick)
        parts.append(
            f'<path class="grid" d="M{place}H{right:.1f}"/>'
            f'<text class="end" transform="translate({place})" x="-6" y="4">{label}</text>'
        )
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True) if shown else ():
        place = at(tick, y_axis.ticks[0])
        parts.append(
            f'<path class="grid" d="M{place}V{top}"/><text transform="translate({place})" y="20">{label}</text>'
        )
    parts.append(f'<path class="frame" d="M{left:.1f} {top}V{bottom}H{right:.1f}"/>')
    drawn = [
        _lines(index, series.name, points, at)
        for index, (series, points) in enumerate(zip(plot.series, found, strict=True))
    ]
    parts += [band for band, _, _ in drawn] + [line for _, line, _ in drawn]
    missing = ", ".join(f"{n} point{'s' * (n > 1)} {why}" for why, n in sorted(left_out.items()))
    note = f"{plot.note} {f'Left out: {missing}.' if missing else ''}".strip()
    above = f'<ul class="legend">{"".join(legend for _, _, legend in drawn)}</ul>\n'
    above += f'<p class="axis">↑ {_escape(plot.y_label)}</p>'
    return _figure(plot, above, (WIDTH, HEIGHT), parts, note)


def _figure(chart: Plot | HeatMap, above: str, size: tuple[float, float], parts: Sequence[str], note: str) -> str:
    title, (width, height) = _escape(chart.title), size
    limits = f"min-width:{width * SMALLEST:.0f}px;max-width:{width * 1.5:.0f}px"
    drawing = (
        f'<svg class="drawing" role="img" aria-label="{title}" viewBox="0 0 {width:.0f} {height:.0f}" style="{limits}">'
    )
    inner = "\n".join(['<div class="scroll" tabindex="0">', drawing, *parts, "</svg>\n</div>"])
    below = f'<p class="axis x">{_escape(chart.x_label)} →</p>\n<p class="note">{_escape(note)}</p>'
    caption = f"<figcaption><h2>{title}</h2></figcaption>"
    return f'<figure class="{"wide" * (width > WIDTH)}">\n{caption}\n{above}\n{inner}\n{below}\n</figure>'


def _lines(
    index: int, name: str, points: Sequence[_Point | None], at: Callable[[float, float], str]
) -> tuple[str, str, str]:
    """The band, the line with its markers, and the legend's entry; a gap ends a stretch of band and line."""
    bands, lines, colour, shape = "", "", f'style="color:var(--s{index % 7})"', SHAPES[index % len(SHAPES)]
    for run in ([p for p in run if p] for there, run in groupby(points, key=bool) if there):
        if any(low != high for _, _, low, high in run):
            around = [at(x, high) for x, _, _, high in run] + [at(x, low) for x, _, low, _ in reversed(run)]
            bands += f'<path class="band" d="M{"L".join(around)}Z"/>'
        lines += f'<path class="line" d="M{"L".join(at(x, y) for x, y, _, _ in run)}"/>'
    shown = [point for point in points if point]
    # The markers of all points of a long series would hide its line.
    for x, y, low, high in shown[:: len(shown) // 50 + 1]:
        band = f" ({format_number(low)} to {format_number(high)})" if low != high else ""
        tip = _escape(f"{name}: {format_number(x)}, {format_number(y)}{band}")
        lines += f'\n<path class="dot" d="{shape}" transform="translate({at(x, y)})"><title>{tip}</title></path>'
    swatch = f'<path class="line" d="M0 7H28"/><path class="dot" d="{shape}" transform="translate(14 7)"/>'
    label = f"<span>{_escape(name)}{'' if shown else ' (no data)'}</span>"
    legend = f'<li><svg {colour} width="28" height="14" aria-hidden="true">{swatch}</svg>{label}</li>'
    return f"<g {colour}>{bands}</g>", f"<g {colour}>{lines}</g>", legend


def _shade(share: float) -> tuple[str, str]:
    """The colour at 0..1 of the scale and the class of the text that reads on it."""
    spot = min(max(share, 0.0), 1.0) * (len(SCALE) - 1)
    below = min(int(spot), len(SCALE) - 2)
    red, green, blue = (
        round(a + (b - a) * (spot - below)) for a, b in zip(SCALE[below], SCALE[below + 1], strict=True)
    )
    return f"#{red:02x}{green:02x}{blue:02x}", "deep" if 0.3 * red + 0.59 * green + 0.11 * blue > 115 else "pale"


def _heat_map(chart: HeatMap) -> str:
    known = [float(v) for row in chart.values for v in row if v is not None and math.isfinite(v)]
    low = min(known, default=0.0) if chart.low is None else chart.low
    high = max(known, default=1.0) if chart.high is None else chart.high
    x_ticks, y_ticks = ([_plain(tick) for tick in ticks] for ticks in (chart.x_ticks, chart.y_ticks))
    x_short, y_short = (
        [tick if len(tick) <= 16 else tick[:15] + "…" for tick in ticks] for ticks in (x_ticks, y_ticks)
    )
    left = max(map(len, y_short), default=0) * GLYPH + 8
    widest = max(map(len, [*x_short, *(format_number(v) for row in chart.values for v in row)]), default=0) * GLYPH + 8
    cell = max(widest, min((WIDTH - left) / max(len(x_ticks), 1), 90.0))
    tall, width = 28.0, max(left + cell * len(x_ticks), WIDTH)
    parts = [
        f'<text class="end" x="{left - 6:.1f}" y="{tall * r + 19:.1f}">{_escape(tick)}</text>'
        for r, tick in enumerate(y_short)
    ]
    base = tall * len(y_ticks) + 16
    parts += [
        f'<text x="{left + cell * (c + 0.5):.1f}" y="{base}">{_escape(tick)}</text>' for c, tick in enumerate(x_short)
    ]
    for r, row in enumerate(chart.values):
        for c, value in enumerate(row):
            fill, ink = (
                ("", "")
                if value is None or math.isnan(value)
                else _shade((value - low) / (high - low) if high > low else 0.5)
            )
            x, y = left + cell * c, tall * r
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell - 1:.1f}" height="{tall - 1:.1f}"'
            tip = _escape(f"{chart.y_label} {y_ticks[r]}, {chart.x_label} {x_ticks[c]}: {format_number(value)}")
            look = f'fill="{fill}"' if fill else 'class="none"'
            text = f'<text class="{ink}" x="{x + cell / 2:.1f}" y="{y + 19:.1f}">{format_number(value)}</text>'
            parts.append(f"<g><title>{tip}</title><rect {box} {look}/>{text}</g>")
    swatches = "".join(f'<path fill="{_shade(i / 20)[0]}" d="M{i * 6} 0h6.5v12h-6.5z"/>' for i in range(21))
    scale = f'{format_number(low)}<svg width="126" height="12" aria-hidden="true">{swatches}</svg>{format_number(high)}'
    above = f'<ul class="legend"><li>{scale}</li></ul>\n<p class="axis">↓ {_escape(chart.y_label)}</p>'
    return _figure(chart, above, (width, base + 8), parts, chart.note)


def render_text(sections: Sequence[Section]) -> str:
    """The same for a terminal, in aligned columns: "* " marks good cells and "! " bad ones; plots and heat maps are
    left out."""
    blocks: list[list[str]] = []
    for section in sections:
        if isinstance(section, Table):
            marks = {"good": "* ", "bad": "! ", None: ""}
            rows = [
                [marks[_flag(section, r, c)] + _plain(value) for c, value in enumerate(row)]
                for r, row in enumerate(section.rows)
            ]
            head, *lines = _aligned([list(map(_plain, section.columns)), *rows], _numeric(section))
            blocks.append(
                [_plain(section.title), head, "-" * max(map(len, [head, *lines])), *lines, _plain(section.note)]
            )
        elif isinstance(section, KeyValues):
            pairs = [["", _plain(key), _plain(value)] for key, value in section.mapping.items()]
            blocks.append([_plain(section.title), *_aligned(pairs, [False] * 3)])
        elif isinstance(section, Paragraph):
            blocks += [textwrap.wrap(_plain(text), 100) for text in section.text.split("\n\n") if text.strip()]
    return "\n".join("".join(f"{line}\n" for line in block if line) for block in blocks)


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [f"{text:{'>' if side else '<'}{width}}" for text, width, side in zip(row, widths, right, strict=True)]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in padded]
