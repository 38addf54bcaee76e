"""Tests of plots: the values that they show, those that are left out, and tables in their place."""

import math
import re

import pytest

from kvexport.report import page as report_page
from kvexport.report.drawings import _points
from kvexport.report.page import render_html
from kvexport.report.sections import Paragraph, Plot, Section, Series
from tests.support.report_pages import Page, drawings, page


def texts(section: Section) -> list[str]:
    return [element.text or "" for element in drawings(page(section))[0].iter() if element.tag.endswith("text")]


def test_a_plot_has_its_labels_its_legend_and_ticks_that_can_be_read() -> None:
    shown = texts(
        Plot("p", "slots", "nats", [Series("one", [16, 32, 64], [1, 2, 3]), Series("_two", [16], [2])], x_log=True)
    )
    assert {"slots", "nats", "16", "32", "64"} <= set(shown)
    assert [text.strip("\u200b") for text in shown if text.startswith("\u200b")] == ["one", "_two"]


def test_values_that_an_axis_cannot_show_are_left_out_and_counted() -> None:
    series = [Series("s", [1, 2, 3, 0], [0, 5, math.inf, 1]), Series("none", [1], [None])]
    html = page(Plot("p", "x", "y", series, x_log=True, y_log=True, note="A note."))
    assert "A note. Left out: 4 points that the axes cannot show." in Page(html).text()
    assert "none (no data)" in Page(html).text()
    assert "Left out" not in Page(page(Plot("p", "x", "y", [Series("s", [1, 2], [0, 5])]))).text()


def test_a_gap_ends_the_line_and_a_band_without_end_is_the_line() -> None:
    series = Series("s", [1, 2, 3], [1, None, 3], low=[0.5, 1, math.inf], high=[2, 3, 4])
    x, y, low, high = _points(Plot("p", "x", "y", [series]), series)
    assert x == [1, 2, 3] and y[0] == 1 and math.isnan(y[1]) and math.isnan(low[1])
    assert (low[0], low[2], high[0], high[2]) == (0.5, 3, 2, 4)


@pytest.mark.parametrize("values", [[], [None], [math.nan, None], [1e308, 1.0], [5.0, 5.0], [0.0, -1e-320]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_can_be_drawn(values: list[float | None], log: bool) -> None:
    series = [Series("s", list(range(len(values))), values)]
    section = Plot("p", "x", "y", series, x_log=log, y_log=log, x_also=(2.0,), y_also=(0.0, 3.0))
    assert len(drawings(page(section))) == 1


def test_without_matplotlib_there_are_tables_and_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "can_draw", lambda: False)
    plot = Plot("p", "slots", "nats", [Series("s", [16, 32], [0.25, None])], note="A note.")
    html = page(plot)
    assert not drawings(html) and Page(html).text().count("pip install 'kvexport[report]'") == 1
    cells = [data for tag, data in Page(html).texts if tag == "td"]
    assert cells == ["s", "16", "0.25", "s", "32", "\N{EN DASH}"]


def test_neighbouring_drawings_share_a_grid() -> None:
    plot = Plot("p", "x", "y", [Series("s", [1], [1])])
    html = render_html("Report", "of a run", [plot, plot, Paragraph("text"), plot])
    assert [len(re.findall("<figure", group)) for group in html.split('<div class="figures">')[1:]] == [2, 1]
