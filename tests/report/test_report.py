"""The report's page and text: what a browser, an XML parser and a reader get out of them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvexport.report.axes import format_number
from kvexport.report.page import render_html
from kvexport.report.sections import HeatMap, KeyValues, Paragraph, Plot, Section, Series, Table
from kvexport.report.text import render_text

HOSTILE = (
    "</title></style>\"'><script>alert(1)</script>&amp;<img src=x onerror=a> \x00\x1b[31m \x9b \ud800 \uffff --> ]]>"
)
VOID = {"meta"}
DASH = "\N{EN DASH}"


class Page(HTMLParser):
    """Checks that tags balance and keeps what was seen."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(("".join(self.open[-1:]), data))

    def text(self) -> str:
        return "".join(data for _, data in self.texts)


def page(*sections: Section) -> str:
    return render_html("Report", "of a run", sections)


def drawings(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg class="drawing".*?</svg>', html, re.DOTALL)]


def with_class(drawing: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in drawing.iter() if element.get("class") == name]


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.?\d*", text)]


def place(element: ElementTree.Element) -> tuple[float, float]:
    x, y = numbers(element.attrib["transform"])
    return x, y


def every_kind(text: str = "plain") -> list[Section]:
    series = [Series(text, [1, 2], [3, 4], low=[2, 3], high=[5, 5]), Series(text, [], [])]
    return [
        Paragraph(text),
        KeyValues(text, {text: text, "none": None}),
        Table(text, [text, "b"], [[text, 1.5], [text, None]], note=text, highlight={(0, 1): "good", (1, 1): "bad"}),
        Plot(text, text, text, series, y_log=True, note=text),
        HeatMap(text, text, text, [text, 2], [text], [[0.5, None]], note=text),
    ]


def test_nothing_is_fetched() -> None:
    html = page(*every_kind())
    for forbidden in ("http:", "https:", "//", "src=", "href", "url(", "@import", "<script", "<link", "<iframe"):
        assert forbidden not in html.lower()


def test_hostile_text_stays_text() -> None:
    html = render_html(HOSTILE, HOSTILE, every_kind(HOSTILE))
    hostile, plain = Page(html), Page(render_html("plain", "plain", every_kind()))
    assert [tag for tag, _ in hostile.seen] == [tag for tag, _ in plain.seen]
    assert [set(attributes) for _, attributes in hostile.seen] == [set(attributes) for _, attributes in plain.seen]
    assert len(drawings(html)) == 2
    # Two long ticks of the heat map are cut.
    assert hostile.text().count("<script>alert(1)</script>") == plain.text().count("plain") - 2
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", html)


@given(st.text(max_size=30))
def test_any_text_can_be_shown(text: str) -> None:
    html = render_html(text, text, every_kind(text))
    assert Page(html.encode("utf-8").decode("utf-8")).seen
    assert len(drawings(html)) == 2
    assert "\x1b" not in render_text(every_kind(text))


def test_same_input_same_page_in_every_process() -> None:
    code = (
        "from kvexport.report.page import render_html\n"
        "from kvexport.report.sections import Plot, Series, Table\n"
        "from kvexport.report.text import render_text\n"
        "flags = {(0, 0), (1, 1), (0, 1), (1, 0)}\n"
        "plot = Plot('p', 'x', 'y', [Series('s', [1, 2], [0, None])], y_log=True)\n"
        "data = [Table('t', ['a', 'b'], [[1, 2], [3, 4]], highlight=flags), plot]\n"
        "print(ascii(render_html('t', 's', data)), ascii(render_text(data)))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 1000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (-0.0, "0"), (7, "7"), (2048, "2048"), (131072, "131,072"), (10**400, f"{10**400:,}"), (True, "yes"),
        (None, DASH), (5.4721, "5.472"), (0.5, "0.5"), (1.0, "1"), (-0.123456, "-0.1235"), (999.96, "1000"),
        (12345.6, "12,346"), (1e-4, "0.0001"), (9.99e-5, "9.99e-5"), (-3.21987e-12, "-3.22e-12"), (1.5e9, "1.5e9"),
        (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_a_number_reads_back_to_four_digits(value: float) -> None:
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=6e-4, abs=0)


def cells(html: str) -> list[list[str]]:
    return [(attributes["class"] or "").split() for tag, attributes in Page(html).seen if tag == "td"]


def by_row(row: int, column: int) -> str | None:
    return ("bad", "good")[row] if column else None


@pytest.mark.parametrize("highlight", [{(0, 1): "bad", (1, 1): "good"}, by_row])
def test_cells_are_flagged_with_a_mark_as_well_as_a_colour(highlight: object) -> None:
    table = Table("t", ["method", "ratio"], [["a", 1.4], ["b", 1.0]], highlight=highlight)  # type: ignore[arg-type]
    html = page(table)
    assert cells(html) == [[], ["num", "bad"], [], ["num", "good"]]
    assert re.findall("[✗✓] .*?(?=b|$)", Page(html).text(), re.MULTILINE) == ["✗ 1.4", "✓ 1"]
    assert [line.split()[1:] for line in render_text([table]).splitlines()[3:]] == [["!", "1.4"], ["*", "1"]]


def test_a_bare_set_flags_bad_cells() -> None:
    assert cells(page(Table("t", ["a"], [[1], [2]], highlight={(1, 0)}))) == [["num"], ["num", "bad"]]


def test_a_column_of_numbers_is_aligned_right_with_its_gaps() -> None:
    assert cells(page(Table("t", ["a", "b", "c"], [["x", 1, True], ["y", None, False]]))) == [
        [],
        ["num"],
        [],
        [],
        ["num"],
        [],
    ]


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2"):
        Table("t", ["a", "b"], [[1, 2], [3]])
    with pytest.raises(ValueError, match="differ in length"):
        Series("s", [1, 2], [1, 2], low=[1])
    for values in ([[1, 2]], [[1, 2], [3]], []):
        with pytest.raises(ValueError, match="2 rows"):
            HeatMap("h", "x", "y", ["a", "b"], [1, 2], values)


def only(*series: Series, x_log: bool = False, y_log: bool = False) -> tuple[ElementTree.Element, str]:
    html = page(Plot("p", "x", "y", series, x_log=x_log, y_log=y_log))
    return drawings(html)[0], Page(html).text()


def test_markers_lie_where_their_values_are_between_the_ticks() -> None:
    drawing, _ = only(Series("s", [0, 5, 10], [0, 50, 100]))
    (x0, y0), (x1, y1), (x2, y2) = map(place, with_class(drawing, "dot"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x0 < x2
    assert y0 > y2


def axis_labels(drawing: ElementTree.Element, horizontal: bool) -> list[tuple[float, str]]:
    found = [text for text in drawing.iter("text") if (text.get("class") != "end") == horizontal]
    return [(place(text)[0 if horizontal else 1], text.text or "") for text in found]


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
def test_ticks_tell_the_truth_and_do_not_overlap(low: float, high: float, log: bool) -> None:
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
def test_whatever_the_values_the_drawing_stays_inside_its_frame(
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
        found = numbers(path.attrib["d"])
        places += zip(found[::2], found[1::2], strict=True)
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
        "depth 50 %, length 2048: " + DASH: DASH,
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


def test_paragraphs_are_split_at_empty_lines() -> None:
    texts = [data for tag, data in Page(page(Paragraph("one\nstill one\n\ntwo\n\n"))).texts if tag == "p"]
    assert [text for text in texts if text != "of a run"] == ["one still one", "two"]


def test_text_lines_columns_up() -> None:
    text = render_text(
        [Table("Speed", ["method", "tokens/s"], [["keepkv", 1234.5], ["a longer name", None]], note="Median of 5.")]
    )
    title, head, rule, first, second, note = text.splitlines()
    assert (title, note) == ("Speed", "Median of 5.")
    assert set(rule) == {"-"}
    assert len({len(line) for line in (head, rule, first, second)}) == 1
    assert first.endswith("1234")


def test_text_has_everything_but_the_drawings() -> None:
    text = render_text(every_kind("plain"))
    blocks = text.split("\n\n")
    assert len(blocks) == 3
    assert blocks[0] == "plain"
    assert [line.split() for line in blocks[1].splitlines()] == [["plain"], ["plain", "plain"], ["none", DASH]]
    assert text.endswith("\n")
    assert render_text([]) == ""
    assert render_text([Plot("p", "x", "y", [])]) == ""
    assert max(map(len, render_text([Paragraph("word " * 100)]).splitlines())) <= 100


def test_empty_tables_and_values() -> None:
    empty: list[Section] = [
        Table("no rows", ["a"], []),
        Table("no columns", [], []),
        KeyValues("none", {}),
        Paragraph(""),
    ]
    assert "no rows" in Page(page(*empty)).text()
    assert render_text(empty).split() == ["no", "rows", "a", "-", "no", "columns", "none"]
