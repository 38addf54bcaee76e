"""The tables of docs/ and README.md agree with the classes and with benchmarks/results."""

import re

import pytest

from benchmarks import tables
from tests.support.paths import ROOT


def test_documents_hold_the_tables_that_are_written_for_them() -> None:
    current, shown = tables.tables(), set()
    for path in tables.PAGES:
        text = path.read_text(encoding="utf-8")
        shown |= set(re.findall(r"<!-- ([\w -]+) -->\n\|", text))
        assert text == tables.written(text, current), f"{path.name} is old: python benchmarks/tables.py"
    assert shown == set(current)


def test_the_figure_of_lengths_is_drawn_from_the_results() -> None:
    texts = tables.FIGURE.read_text(encoding="utf-8"), tables.length_figure()
    (shown, numbers), (current_shown, current_numbers) = (
        (re.split(r"-?[\d.]+", text), [float(x) for x in re.findall(r"-?\d+\.?\d*", text)]) for text in texts
    )
    assert shown == current_shown and numbers == pytest.approx(current_numbers, abs=0.5), "python benchmarks/tables.py"


def test_a_table_is_replaced_between_its_marks_and_an_unknown_mark_is_an_error() -> None:
    text = "before\n<!-- methods -->\n| old |\n<!-- end -->\nafter"
    assert tables.written(text, {"methods": "| new |"}) == "before\n<!-- methods -->\n| new |\n<!-- end -->\nafter"
    with pytest.raises(KeyError, match="method"):
        tables.written(text, {})


def test_results_name_no_folder_of_a_machine() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert not re.search(r'"/|(?<![\w.])/(tmp|home|root|work)/', path.read_text(encoding="utf-8")), path.name


def test_the_real_model_was_compared_on_the_same_texts() -> None:
    group = tables.load("sweep-smollm2-135m-base")["groups"]["methods"]
    rows = group["rows"]
    assert group["text"] == "Python's manual"
    for r in rows:
        score = r["scores"]["text"]
        assert len(score["samples"]["kl"]) == score["kl"]["count"] == group["samples"]
        assert sum(score["samples"]["kl"]) / group["samples"] == pytest.approx(score["kl"]["value"], rel=1e-4)


def test_differences_are_of_the_same_texts() -> None:
    shown = tables.differences("smollm2-135m-base", "text", "kl")
    rows = tables.load("sweep-smollm2-135m-base")["groups"]["methods"]["rows"]
    kl = {r["label"]: r["scores"]["text"]["kl"]["value"] for r in rows if r["budget"] == 0.125}
    cells = [part.strip() for part in next(x for x in shown.splitlines() if x.startswith("| `h2o`")).split("|")]
    at = [part.strip() for part in shown.splitlines()[0].split("|")].index("budget 1/8")
    assert float(cells[at].strip("*").split()[0]) == pytest.approx(kl["h2o"] - kl["keepkv"], rel=1e-2)
    assert not any(row.startswith("| `keepkv` |") for row in shown.splitlines())


def test_the_index_names_every_script_and_every_page_that_shows_its_figures() -> None:
    folder = ROOT / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:\w+/)?(\w+\.py)`", text))
    scripts = {path.name for path in folder.rglob("*.py") if not path.name.startswith("test_")}
    assert named == scripts
    for script, pages in re.findall(r"^\| `(\w+)\.py` \|.*\| (.*) \|$", text, re.MULTILINE):
        for page in set(re.findall(r"\w+/[\w-]+\.md", pages)):
            assert script in (ROOT / "docs" / page).read_text(encoding="utf-8"), f"{page} does not mention {script}.py"
