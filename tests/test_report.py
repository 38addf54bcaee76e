"""Tests of the text of reports."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexport.report import KeyValues, Paragraph, Section, Table, format_number, render_text

DASH = "\N{EN DASH}"


def every_kind(text: str = "plain") -> list[Section]:
    return [
        Paragraph(text),
        KeyValues(text, {text: text, "none": None}),
        Table(text, [text, "b"], [[text, 1.5], [text, None]], note=text, bad={(1, 1)}),
    ]


@settings(max_examples=20)
@given(st.text(max_size=30))
def test_any_text_can_be_shown(text: str) -> None:
    shown = render_text(every_kind(text + "\x1b[31m\x00\x9b\ud800"))
    assert not set(shown) & set("\x1b\x00\x9b\ud800")


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


def test_text_lines_columns_up_and_marks_bad_cells() -> None:
    rows = [["keepkv", 1234.5], ["a longer name", None]]
    text = render_text([Table("Speed", ["method", "tokens/s"], rows, note="Median of 5.", bad={(0, 1)})])
    title, head, rule, first, second, note = text.splitlines()
    assert (title, note) == ("Speed", "Median of 5.")
    assert set(rule) == {"-"}
    assert len({len(line) for line in (head, rule, first, second)}) == 1
    assert first.endswith("! 1234")


def test_text_has_every_section() -> None:
    blocks = render_text(every_kind()).split("\n\n")
    assert blocks[0] == "plain"
    assert [line.split() for line in blocks[1].splitlines()] == [["plain"], ["plain", "plain"], ["none", DASH]]
    assert len(blocks) == 3
    assert render_text([]) == ""
    assert max(map(len, render_text([Paragraph("word " * 100)]).splitlines())) <= 100
    assert render_text([Table("no rows", ["a"], []), Table("no columns", [], [])])


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2"):
        Table("t", ["a", "b"], [[1, 2], [3]])
