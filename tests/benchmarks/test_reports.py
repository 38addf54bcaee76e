"""Tests of the table of public reports: its tests exist, and their outcomes are counted in the rows that name them."""

from __future__ import annotations

import ast

from benchmarks.correctness.reports import ROWS, counted
from tests.support.paths import ROOT


def test_every_row_names_tests_that_exist() -> None:
    assert len(ROWS) >= 36
    for file in {file for tests in ROWS.values() for file, *_ in tests}:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for tests in ROWS.values() for other, name, _ in tests if other == file} <= functions


def test_outcomes_are_counted_in_the_rows_of_their_cases() -> None:
    read = "tests/language/test_tools.py::test_calls_are_parsed_from_text_in_any_pieces"
    follow = "tests/language/test_grammar.py::test_a_tokenizer_of_every_family_can_write_what_a_grammar_forces"
    cases = {f"{read}[xml, two]": True, f"{read}[glm]": False, f"{read}x[glm]": True, f"{follow}[GPT-2]": False}
    rows = counted({**cases, f"{follow}[GPT-2, space first]": True})
    assert rows["calls of Qwen3-Coder and Qwen 3.5 stay text"] == {"tests": 1, "failures": 1}
    assert rows["calls of GLM stay text"] == {"tests": 1, "failures": 0}
    assert rows["grammars with a tokenizer of the family GPT-2"] == {"tests": 1, "failures": 0}
    assert rows["grammars with a tokenizer of the family GPT-2, space first"] == {"tests": 1, "failures": 1}
