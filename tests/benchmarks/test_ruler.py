"""Tests of the benchmark of RULER: its prompts are RULER's, and the text is read without the question."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import ruler
from kvexport.evaluate.suites import read_ruler

HAYSTACK = "\n".join(
    f"One of the hidden numbers for {key} is: {value}." for key, value in (("a-b", "17"), ("c-d", "29"))
)
INPUT, PREFIX = f"Read this.\n{HAYSTACK}\nWhat is the number for a-b?", " The number for a-b is"
WRITER = """import json, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(given["--save_dir"]) / given["--save_name"]
folder.mkdir(parents=True)
row = {"input": %r, "outputs": ["17"], "answer_prefix": %r, "given": given}
(folder / "validation.jsonl").write_text(json.dumps(row))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the layout of RULER's repository, whose script writes one row with its own arguments."""
    data = tmp_path / "RULER" / "scripts" / "data" / "synthetic"
    data.mkdir(parents=True)
    base = {"tokens_to_generate": 9, "template": "Read {context}\nWhat of {query}?", "answer_prefix": " It is"}
    (data / "constants.py").write_text(f"TASKS = {{'niah': {base!r}}}")
    (data / "niah.py").write_text(WRITER % (INPUT, PREFIX))
    (data.parent.parent / "synthetic.yaml").write_text("niah_multikey_2:\n  task: niah\n  args:\n    num_needle_k: 1\n")
    return tmp_path / "RULER"


def test_the_scripts_of_ruler_get_the_arguments_that_its_own_program_gives_them(checkout: Path, tmp_path: Path) -> None:
    ruler.prepare(checkout, tmp_path / "tokenizer", 512, 3, ["niah_multikey_2"], tmp_path / "out")
    given = json.loads((tmp_path / "out" / "niah_multikey_2" / "validation.jsonl").read_text())["given"]
    assert given.pop("--save_dir") and given.pop("--tokenizer_path")
    assert given == {
        "--save_name": "niah_multikey_2",
        "--tokenizer_type": "hf",
        "--max_seq_length": "512",
        "--tokens_to_generate": "9",
        "--num_samples": "3",
        "--template": "Read {context}\nWhat of {query}? It is",
        "--num_needle_k": "1",
    }


@pytest.mark.parametrize("rendered", [INPUT, f"<user>{INPUT}<end>\n<assistant>"], ids=["plain", "chat"])
def test_the_parts_of_a_prompt_are_the_whole_prompt_and_only_the_last_has_the_question(
    rendered: str, checkout: Path, tmp_path: Path
) -> None:
    ruler.prepare(checkout, tmp_path, 512, 1, ["niah_multikey_2"], tmp_path / "out")
    (item,) = read_ruler(tmp_path / "out")["ruler/niah_multikey_2"]
    text, after = ruler.parts_of(rendered, item)
    assert text + after == rendered and text.endswith(HAYSTACK) and after.startswith("\nWhat is the number for a-b?")
    row: dict[str, Any] = {"outputs": ["17"]}
    first, second = ruler.questions_of(after, item, row, 4)
    assert first == (after, PREFIX, ["17"])
    assert second == (after.replace("a-b", "c-d"), " The number for c-d is", ["29"])
    assert ruler.questions_of(after, item, row, 1) == [first]
    assert item.score("it is 17.") == 1.0


def test_an_interval_is_of_texts_and_its_mean_of_tasks() -> None:
    mean, low, high = ruler.interval([[[1.0, 0.0], [1.0, 1.0]], [[0.0], [0.0]]])
    assert mean == pytest.approx(0.375) and low == pytest.approx(0.25) and high == pytest.approx(0.5)
