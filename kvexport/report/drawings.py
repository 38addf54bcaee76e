"""Plots and heat maps of a report as SVG within HTML figures.

The code writes SVG itself. A report needs SVG without scripts whose colours follow the page (dark screens, paper),
bands around lines, and heat maps, and no small library has all of this. matplotlib does, but its packages take 98 MB,
also on machines that only run artifacts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from kvexport.report.axes import TINY, axis_of, format_number
from kvexport.report.sections import HeatMap, Plot, Series, escape, plain

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


def figure(drawing: Plot | HeatMap) -> str:
    """Return a plot or heat map of a report as an HTML figure with SVG."""
    return _plot(drawing) if isinstance(drawing, Plot) else _heat_map(drawing)


def _points(plot: Plot, series: Series, left_out: Counter[str]) -> list[_Point | None]:
    """Return the points of a plot's series, None for points that cannot be drawn; `left_out` counts the reasons."""
    points: list[_Point | None] = []
    columns = [
        [None] * len(series.x) if values is None else values for values in (series.x, series.y, series.low, series.high)
    ]
    for x, y, low, high in (
        [math.nan if value is None else float(value) for value in point] for point in zip(*columns, strict=True)
    ):
        why = "" if abs(x) < BIG and abs(y) < BIG else "not a finite number"
        if (plot.x_log and x < TINY) or (plot.y_log and y < TINY):
            why = "at or below zero, which a logarithmic axis cannot show"
        points.append(None if why else (x, y, low if abs(low) < BIG else y, high if abs(high) < BIG else y))
        left_out.update([why] if why else [])
    return points


def _plot(plot: Plot) -> str:
    left_out: Counter[str] = Counter()
    all_points = [_points(plot, series, left_out) for series in plot.series]
    shown = [point for points in all_points for point in points if point]
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
        for index, (series, points) in enumerate(zip(plot.series, all_points, strict=True))
    ]
    parts += [band for band, _, _ in drawn] + [line for _, line, _ in drawn]
    missing = ", ".join(f"{n} point{'s' * (n > 1)} {why}" for why, n in sorted(left_out.items()))
    note = f"{plot.note} {f'Left out: {missing}.' if missing else ''}".strip()
    above = f'<ul class="legend">{"".join(legend for _, _, legend in drawn)}</ul>\n'
    above += f'<p class="axis">↑ {escape(plot.y_label)}</p>'
    return _framed(plot, above, (WIDTH, HEIGHT), parts, note)


def _framed(chart: Plot | HeatMap, above: str, size: tuple[float, float], parts: Sequence[str], note: str) -> str:
    title, (width, height) = escape(chart.title), size
    limits = f"min-width:{width * SMALLEST:.0f}px;max-width:{width * 1.5:.0f}px"
    drawing = (
        f'<svg class="drawing" role="img" aria-label="{title}" viewBox="0 0 {width:.0f} {height:.0f}" style="{limits}">'
    )
    inner = "\n".join(['<div class="scroll" tabindex="0">', drawing, *parts, "</svg>\n</div>"])
    below = f'<p class="axis x">{escape(chart.x_label)} →</p>\n<p class="note">{escape(note)}</p>'
    caption = f"<figcaption><h2>{title}</h2></figcaption>"
    return f'<figure class="{"wide" * (width > WIDTH)}">\n{caption}\n{above}\n{inner}\n{below}\n</figure>'


def _lines(
    index: int, name: str, points: Sequence[_Point | None], at: Callable[[float, float], str]
) -> tuple[str, str, str]:
    """Return a series of a plot as SVG: the band, the line with its markers, and the legend's entry.

    A gap interrupts band and line.
    """
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
        tip = escape(f"{name}: {format_number(x)}, {format_number(y)}{band}")
        lines += f'\n<path class="dot" d="{shape}" transform="translate({at(x, y)})"><title>{tip}</title></path>'
    swatch = f'<path class="line" d="M0 7H28"/><path class="dot" d="{shape}" transform="translate(14 7)"/>'
    label = f"<span>{escape(name)}{'' if shown else ' (no data)'}</span>"
    legend = f'<li><svg {colour} width="28" height="14" aria-hidden="true">{swatch}</svg>{label}</li>'
    return f"<g {colour}>{bands}</g>", f"<g {colour}>{lines}</g>", legend


def _shade(share: float) -> tuple[str, str]:
    """Return the colour of a heat map's cell at 0 to 1 of the scale, and the CSS class of text legible on it."""
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
    x_ticks, y_ticks = ([plain(tick) for tick in ticks] for ticks in (chart.x_ticks, chart.y_ticks))
    x_short, y_short = (
        [tick if len(tick) <= 16 else tick[:15] + "…" for tick in ticks] for ticks in (x_ticks, y_ticks)
    )
    left = max(map(len, y_short), default=0) * GLYPH + 8
    widest = max(map(len, [*x_short, *(format_number(v) for row in chart.values for v in row)]), default=0) * GLYPH + 8
    cell = max(widest, min((WIDTH - left) / max(len(x_ticks), 1), 90.0))
    tall, width = 28.0, max(left + cell * len(x_ticks), WIDTH)
    parts = [
        f'<text class="end" x="{left - 6:.1f}" y="{tall * r + 19:.1f}">{escape(tick)}</text>'
        for r, tick in enumerate(y_short)
    ]
    base = tall * len(y_ticks) + 16
    parts += [
        f'<text x="{left + cell * (c + 0.5):.1f}" y="{base}">{escape(tick)}</text>' for c, tick in enumerate(x_short)
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
            tip = escape(f"{chart.y_label} {y_ticks[r]}, {chart.x_label} {x_ticks[c]}: {format_number(value)}")
            look = f'fill="{fill}"' if fill else 'class="none"'
            text = f'<text class="{ink}" x="{x + cell / 2:.1f}" y="{y + 19:.1f}">{format_number(value)}</text>'
            parts.append(f"<g><title>{tip}</title><rect {box} {look}/>{text}</g>")
    swatches = "".join(f'<path fill="{_shade(i / 20)[0]}" d="M{i * 6} 0h6.5v12h-6.5z"/>' for i in range(21))
    scale = f'{format_number(low)}<svg width="126" height="12" aria-hidden="true">{swatches}</svg>{format_number(high)}'
    above = f'<ul class="legend"><li>{scale}</li></ul>\n<p class="axis">↓ {escape(chart.y_label)}</p>'
    return _framed(chart, above, (width, base + 8), parts, chart.note)
