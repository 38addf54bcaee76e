"""Tests of plots and heat maps: the places of their marks, and the values that are left out and counted."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvexport.report.sections import HeatMap, Paragraph, Plot, Series
from tests.support.report_pages import Page, drawings, page


def with_class(drawing: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in drawing.iter() if element.get("class") == name]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def place(element: ElementTree.Element) -> tuple[float, float]:
    x, y = numbers(element.attrib["transform"])
    return x, y


def only(*series: Series, x_log: bool = False, y_log: bool = False) -> tuple[ElementTree.Element, str]:
    html = page(Plot("p", "x", "y", series, x_log=x_log, y_log=y_log))
    return drawings(html)[0], Page(html).text()


def test_markers_are_placed_by_their_values_between_the_ticks() -> None:
    drawing, _ = only(Series("s", [0, 5, 10], [0, 50, 100]))
    (x0, y0), (x1, y1), (x2, y2) = map(place, with_class(drawing, "dot"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x0 < x2
    assert y0 > y2


def axis_labels(drawing: ElementTree.Element, horizontal: bool) -> list[tuple[float, str]]:
    labels = [text for text in drawing.iter("text") if (text.get("class") != "end") == horizontal]
    return [(place(text)[0 if horizontal else 1], text.text or "") for text in labels]


RANGES = [
    (0, 1),
    (0, 131072),
    (3, 97),
    (-0.02, 0.013),
    (1e-7, 3e-6),
    (0.99991, 1.00002),
    (1e6, 9e8),
    (-5e12, 3e12),
    (5, 5),
    (0, 0),
    (1, 1 + 2**-52),
]


LOG_RANGES = [
    (1, 1e6),
    (256, 131072),
    (3, 97),
    (0.5, 0.7),
    (1e-12, 1e3),
    (1e-90, 1e90),
    (1.1, 9.5),
    (8, 8),
    (1, 2**40),
    (999, 1001),
]


@pytest.mark.parametrize(("low", "high", "log"), [(*r, False) for r in RANGES] + [(*r, True) for r in LOG_RANGES])
def test_tick_labels_are_exact_and_do_not_overlap(low: float, high: float, log: bool) -> None:
    drawing, _ = only(Series("s", [low, high], [low, high]), x_log=log, y_log=log)
    dots = [place(dot) for dot in with_class(drawing, "dot")]
    for horizontal in (True, False):
        labels = axis_labels(drawing, horizontal)
        assert 2 <= len(labels) <= 13
        values = [float(text.replace(",", "")) for _, text in labels]
        assert values == sorted(set(values))
        assert values[0] <= low + 1e-12 * abs(low)
        assert high <= values[-1] + 1e-12 * abs(high)
        scale = math.log10 if log else float
        per_unit = (labels[-1][0] - labels[0][0]) / (scale(values[-1]) - scale(values[0]))
        shown = [at for at, _ in labels] + [dot[0 if horizontal else 1] for dot in dots]
        for at, value in zip(shown, [*values, low, high], strict=True):
            assert at == pytest.approx(labels[0][0] + per_unit * (scale(value) - scale(values[0])), abs=0.3)
        for (a, first), (b, second) in pairwise(labels):
            room = 7.7 * (len(first) + len(second)) / 2 if horizontal else 14
            assert abs(b - a) >= room


def test_lengths_that_are_powers_of_two_get_such_ticks() -> None:
    drawing, _ = only(Series("s", [512, 1024, 2048, 4096], [1, 2, 3, 4]), x_log=True)
    assert [text for _, text in axis_labels(drawing, True)] == ["512", "1024", "2048", "4096"]


VALUES = st.none() | st.floats() | st.sampled_from([0.0, 1.0, 1.0 + 1e-12, -1e-320, 1e-99, 1e99, 1e308])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(VALUES, VALUES, VALUES, VALUES), max_size=6), st.booleans(), st.booleans())
@example([(1.0, 0.0, 0.0, 1.0)] * 2, False, True)
@example([], True, True)
def test_a_drawing_of_any_values_stays_inside_its_frame(
    points: list[tuple[float | None, ...]], x_log: bool, y_log: bool
) -> None:
    columns: Sequence[Sequence[float | None]] = [list(column) for column in zip(*points, strict=True)] or [
        [],
        [],
        [],
        [],
    ]
    drawing, text = only(Series("s", *columns), x_log=x_log, y_log=y_log)
    _, _, width, height = numbers(drawing.attrib["viewBox"])
    assert not re.search("nan|inf", " ".join(value for element in drawing.iter() for value in element.attrib.values()))
    dots = with_class(drawing, "dot")
    places = [*map(place, dots)]
    for path in with_class(drawing, "band") + with_class(drawing, "line"):
        coordinates = numbers(path.attrib["d"])
        places += zip(coordinates[::2], coordinates[1::2], strict=True)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    left_out = sum(int(n) for n in re.findall(r"(\d+) points? (?:not a|at or below)", text))
    assert len(dots) + left_out == len(points)
    assert ("no data" in text) == (not dots)


def test_zeros_on_a_logarithmic_axis_are_left_out_and_counted() -> None:
    drawing, text = only(Series("s", [1, 2, 3, 4], [0.0, -1.0, 1e-3, 1e-2]), Series("t", [0], [0.0]), y_log=True)
    assert len(with_class(drawing, "dot")) == 2
    assert "Left out: 3 points at or below zero" in text
    assert "t (no data)" in text


def test_a_gap_ends_the_line_and_the_band() -> None:
    y = [1.0, 2.0, math.nan, 3.0, None, 4.0, 5.0]
    drawing, text = only(Series("s", range(7), y, low=[0.0] * 7))
    assert len(with_class(drawing, "line")) == 3
    assert len(with_class(drawing, "band")) == 3
    assert "2 points not a finite number" in text


def test_a_band_down_to_zero_reaches_the_foot_of_a_logarithmic_axis() -> None:
    drawing, _ = only(Series("s", [1, 2], [1.0, 10.0], low=[0.0, 1.0], high=[2.0, 20.0]), y_log=True)
    (band,) = with_class(drawing, "band")
    foot = max(at for at, _ in axis_labels(drawing, False))
    assert max(numbers(band.attrib["d"])[1::2]) == pytest.approx(foot, abs=0.2)


def test_points_have_tool_tips() -> None:
    drawing, _ = only(Series("keepkv", [2048], [5.25], low=[5.0], high=[5.5]))
    (dot,) = with_class(drawing, "dot")
    assert dot.findtext("title") == "keepkv: 2048, 5.25 (5 to 5.5)"


def test_a_long_series_keeps_its_line_and_thins_its_markers() -> None:
    drawing, _ = only(Series("s", range(5000), range(5000)))
    (line,) = with_class(drawing, "line")
    assert line.attrib["d"].count("L") == 4999
    assert 20 <= len(with_class(drawing, "dot")) <= 60


def test_series_look_different_and_the_legend_shows_them_so() -> None:
    html = page(Plot("p", "x", "y", [Series(f"series {i}", [0, 1], [i, i]) for i in range(35)]))
    groups = [group for group in drawings(html)[0].iter("g") if with_class(group, "dot")]
    looks = [(group.attrib["style"], with_class(group, "dot")[0].attrib["d"]) for group in groups]
    assert len(set(looks)) == 35
    legend = [ElementTree.fromstring(svg) for svg in re.findall(r"<li>(<svg.*?</svg>)", html)]
    assert [(svg.attrib["style"], with_class(svg, "dot")[0].attrib["d"]) for svg in legend] == looks


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_read_in_both_schemes() -> None:
    blocks = [block for block in re.findall(r":root\{([^}]*)\}", page()) if "--bg" in block]
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--([\w-]+):(#\w{6})", block))
        for name in [name for name in colours if re.fullmatch(r"s\d", name)]:
            assert contrast(colours[name], colours["bg"]) >= 3
        for text, ground in (("fg", "bg"), ("mute", "bg"), ("fg", "stripe"), ("good", "good-bg"), ("bad", "bad-bg")):
            assert contrast(colours[text], colours[ground]) >= 4.5


def test_a_heat_map_colours_and_numbers_its_cells() -> None:
    html = page(
        HeatMap("needle", "length", "depth", [1024, 2048], ["0 %", "50 %"], [[0.0, 0.25], [1.0, None]], low=0, high=1)
    )
    (drawing,) = drawings(html)
    assert {title.text: text.text for title, _, text in drawing.iter("g")} == {
        "depth 0 %, length 1024: 0": "0",
        "depth 0 %, length 2048: 0.25": "0.25",
        "depth 50 %, length 1024: 1": "1",
        "depth 50 %, length 2048: \N{EN DASH}": "\N{EN DASH}",
    }
    none, half, full, unknown = (rect.get("fill", rect.get("class", "")) for rect in drawing.iter("rect"))
    assert luminance(none) < luminance(half) < luminance(full)
    assert unknown == "none"


def test_numbers_of_a_heat_map_can_be_read_on_every_colour_and_fit_their_cells() -> None:
    values = [[i / 100 for i in range(-5, 106)]]
    (drawing,) = drawings(page(HeatMap("h", "x", "y", range(111), ["a"], values, low=0, high=1)))
    assert len(list(drawing.iter("g"))) == 111
    for group in drawing.iter("g"):
        _, rect, text = group
        ink = {"deep": "#000000", "pale": "#ffffff"}[text.attrib["class"]]
        assert contrast(rect.attrib["fill"], ink) >= 4.5
        assert len(text.text or "") * 7.7 <= float(rect.attrib["width"])
    _, _, width, _ = numbers(drawing.attrib["viewBox"])
    assert max(float(rect.attrib["x"]) + float(rect.attrib["width"]) for rect in drawing.iter("rect")) <= width


@pytest.mark.parametrize("values", [[[3.0]], [[None]], [[math.nan]], [[math.inf]], [[2.0, 2.0]], []])
def test_heat_maps_with_nothing_to_compare(values: list[list[float | None]]) -> None:
    columns = len(values[0]) if values else 0
    (drawing,) = drawings(page(HeatMap("h", "x", "y", range(columns), range(len(values)), values)))
    assert len(list(drawing.iter("rect"))) == columns


def test_neighbouring_drawings_share_a_grid() -> None:
    plot = Plot("p", "x", "y", [])
    assert page(plot, plot, Paragraph("between"), plot).count('<div class="figures">') == 2
