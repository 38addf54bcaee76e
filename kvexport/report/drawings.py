"""Plots of a report: SVG by matplotlib (extra `report`), or tables of their values without it."""

from __future__ import annotations

import io
import math
import re
import warnings
from itertools import cycle
from typing import TYPE_CHECKING, Any

from kvexport.packages import is_there
from kvexport.report.sections import Plot, Series, Table, escape, format_number, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours of Okabe and Ito, which colour-blind readers can tell apart, without yellow
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c2659a", "#bd8200", "#2f97d3", "#1b1f24")
MARKERS = ("o", "s", "^", "D", "v")
TINY, BIG = 1e-100, 1e100  # bounds of the numbers that are drawn
MANY = 50  # the most markers of a series; more would hide the line
NO_DRAWINGS = "matplotlib, which draws this, is not installed: pip install 'kvexport[report]'"
STYLE: Any = {
    "svg.fonttype": "none",  # text that can be selected and searched
    "svg.hashsalt": "kvexport",  # equal input gives equal ids
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e8ec",
    "legend.frameon": False,
}


def as_table(plot: Plot) -> Table:
    points = [(series.name, x, y) for series in plot.series for x, y in zip(series.x, series.y, strict=True)]
    return Table(plot.title, ["", plot.x_label, plot.y_label], points, f"{plot.note} {NO_DRAWINGS}".strip())


def can_draw() -> bool:
    return is_there("matplotlib")


def figure(plot: Plot) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # matplotlib warns if its font lacks a character, but the reader's browser has other fonts.
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = drawn.add_subplot()
        axes.set_xlabel(plain(plot.x_label))
        axes.set_ylabel(plain(plot.y_label))
        note = f"{plot.note} {_plot(plot, axes)}".strip()
        text = io.StringIO()
        canvas: Any = FigureCanvasSVG(drawn)
        canvas.print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    # In a page of HTML the namespaces of SVG are known, so that a report contains no address.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg ") :]).replace("xlink:href", "href")
    svg = svg.replace("<svg ", f'<svg class="drawing" role="img" aria-label="{escape(plot.title)}" ', 1)
    caption = f"<figcaption><h2>{escape(plot.title)}</h2></figcaption>"
    inner = f'<div class="scroll" tabindex="0">\n{svg}</div>\n<p class="note">{escape(note)}</p>'
    return f"<figure>\n{caption}\n{inner}\n</figure>"


def _plot(plot: Plot, axes: Axes) -> str:
    handles, names, left_out = [], [], 0
    if plot.x_log:
        whole = all(math.frexp(x)[0] == 0.5 for series in plot.series for x in series.x if x)
        axes.set_xscale("log", base=2 if whole else 10)
    if plot.y_log:
        axes.set_yscale("log", nonpositive="clip")
    for series, colour, marker in zip(plot.series, cycle(COLOURS), cycle(MARKERS)):
        x, y, low, high = _points(plot, series)
        left_out += sum(map(math.isnan, y))
        (line,) = axes.plot(x, y, color=colour, marker=marker, markersize=4, markevery=len(x) // MANY + 1)
        axes.fill_between(x, low, high, color=colour, alpha=0.17, linewidth=0)
        handles.append(line)
        names.append(plain(series.name) + " (no data)" * all(map(math.isnan, y)))
    # Further values extend the axes, so that several plots can have equal axes.
    axes.update_datalim([(x, axes.dataLim.y0) for x in plot.x_also], updatey=False)
    axes.update_datalim([(axes.dataLim.x0, y) for y in plot.y_also if y > 0 or not plot.y_log], updatex=False)
    axes.autoscale_view()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: format_number(value))
    if handles:
        # matplotlib leaves a name that begins with _ out of the legend.
        axes.legend(handles, [f"\u200b{name}" for name in names], loc="best")
    return f"Left out: {left_out} point{'s' * (left_out > 1)} that the axes cannot show." if left_out else ""


def _points(plot: Plot, series: Series) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return a series' x, y, and both ends of its band; a point without a place in the plot is NaN."""
    points = []
    for x, y, low, high in zip(series.x, series.y, series.low or series.y, series.high or series.y, strict=True):
        numbers = [math.nan if value is None else float(value) for value in (x, y, low, high)]
        least_x, least_y = (TINY if log else -BIG for log in (plot.x_log, plot.y_log))
        if not (least_x <= numbers[0] < BIG and least_y <= numbers[1] < BIG):
            points.append([numbers[0] if least_x <= numbers[0] < BIG else math.nan, *[math.nan] * 3])
            continue
        points.append([*numbers[:2], *(value if abs(value) < BIG else numbers[1] for value in numbers[2:])])
    columns: Any = tuple(map(list, zip(*points, strict=True))) or ([], [], [], [])
    return columns  # type: ignore[no-any-return]
