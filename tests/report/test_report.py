"""Tests of the report's page and text, as a browser, an XML parser and a reader see them."""

import math
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexport.report.page import render_html
from kvexport.report.sections import KeyValues, Paragraph, Plot, Section, Series, Table, format_number
from kvexport.report.text import render_text
from tests.support.report_pages import Page, drawings, page

HOSTILE = (
    "</title></style>\"'><script>alert(1)</script>&amp;<img src=x onerror=a> \x00\x1b[31m \x9b \ud800 \uffff --> ]]>"
)
DASH = "\N{EN DASH}"


def every_kind(text: str = "plain") -> list[Section]:
    series = [Series(text, [1, 2], [3, 4], low=[2, 3], high=[5, 5]), Series(text, [], [])]
    return [
        Paragraph(text),
        KeyValues(text, {text: text, "none": None}),
        Table(text, [text, "b"], [[text, 1.5], [text, None]], note=text, bad={(1, 1)}),
        Plot(text, text, text, series, y_log=True, note=text),
    ]


def test_nothing_is_fetched() -> None:
    html = page(*every_kind())
    for forbidden in ("src=", "@import", "<script", "<link", "<iframe"):
        assert forbidden not in html.lower()
    # A drawing names XML's namespaces, and refers to its own parts.
    assert set(re.findall(r"(\S+)=\"https?://", html)) <= {"xmlns", "xmlns:xlink", "xmlns:cc", "xmlns:dc", "xmlns:rdf"}
    targets = re.findall(r'href="([^"]*)"', html) + re.findall(r"url\(([^)]*)\)", html)
    assert targets and all(target.startswith("#") for target in targets)


def test_hostile_text_stays_text() -> None:
    html = render_html(HOSTILE, HOSTILE, every_kind(HOSTILE))
    hostile, plain = Page(html), Page(render_html("plain", "plain", every_kind()))
    assert [tag for tag, _ in hostile.seen] == [tag for tag, _ in plain.seen]
    assert [set(attributes) for _, attributes in hostile.seen] == [set(attributes) for _, attributes in plain.seen]
    assert len(drawings(html)) == 1
    assert hostile.text().count("<script>alert(1)</script>") == plain.text().count("plain")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", html)


@settings(max_examples=20, deadline=None)  # matplotlib draws in each
@given(st.text(max_size=30))
def test_any_text_can_be_shown(text: str) -> None:
    html = render_html(text, text, every_kind(text))
    assert Page(html.encode("utf-8").decode("utf-8")).seen
    assert len(drawings(html)) == 1
    assert "\x1b" not in render_text(every_kind(text))


def test_same_input_same_page_in_every_process() -> None:
    code = (
        "from kvexport.report.page import render_html\n"
        "from kvexport.report.sections import Plot, Series, Table\n"
        "from kvexport.report.text import render_text\n"
        "flags = {(0, 0), (1, 1), (0, 1), (1, 0)}\n"
        "plot = Plot('p', 'x', 'y', [Series('s', [1, 2], [0, None])], y_log=True)\n"
        "data = [Table('t', ['a', 'b'], [[1, 2], [3, 4]], bad=flags), plot]\n"
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


def test_bad_cells_have_a_mark_as_well_as_a_colour() -> None:
    table = Table("t", ["method", "ratio"], [["a", 1.4], ["b", 1.0]], bad={(0, 1)})
    html = page(table)
    assert cells(html) == [[], ["num", "bad"], [], ["num"]]
    assert re.findall("✗ .*?(?=b|$)", Page(html).text(), re.MULTILINE) == ["✗ 1.4"]
    assert [line.split()[1:] for line in render_text([table]).splitlines()[3:]] == [["!", "1.4"], ["1"]]


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
