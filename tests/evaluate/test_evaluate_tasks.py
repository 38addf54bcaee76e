"""Tests of the tasks: the answer can be read in the prompt, and cannot be guessed."""

import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvexport.errors import UsageError
from kvexport.evaluate import tiny_language as tiny
from kvexport.evaluate.corpus import is_held_out, library_sources
from kvexport.evaluate.language import Language, Text, Words, language_of
from kvexport.evaluate.statistics import mean, share
from kvexport.evaluate.suites import read_ruler
from kvexport.evaluate.tasks import TASKS, Sample
from kvexport.language.tokenizer import Tokenizer
from tests.support.recipes import SMALL_CHECKPOINT, TINY_CHECKPOINT

SMALL = Tokenizer.from_folder(SMALL_CHECKPOINT)
SOURCE = "\n".join(f"def function_{i}(x):\n    return x + {i}\n" for i in range(400))
EXACT = [name for name, task in TASKS.items() if task.exact]


@pytest.fixture(scope="module")
def text() -> Language:
    return Text(SMALL, SOURCE)


def read_answer(question: str, lines: list[str]) -> str:
    """Return the answer of a careful reader of the statements to a question in the text language."""
    statements = [match.groups() for line in lines if (match := re.fullmatch(r"# (\w+) (\w+)", line))]
    *kind, name = question.removeprefix("# ").split()
    values = Counter(thing for who, thing in statements if who == name)
    assert len(values) == 1 or kind == ["mostly"]
    return values.most_common(1)[0][0]


def parts(sample: Sample) -> tuple[list[str], str, str]:
    """Return (lines before the question, question, answer) of a sample in the text language."""
    *lines, question = SMALL.decode(sample.ids[: sample.prompt]).split("\n")
    return lines, question, SMALL.decode(sample.ids[sample.prompt :]).strip()


@pytest.mark.parametrize("name", EXACT)
def test_the_answer_can_be_read_off_the_prompt(name: str, text: Language) -> None:
    for sample in TASKS[name].samples(text, 6, 512, seed=3):
        lines, question, answer = parts(sample)
        assert read_answer(question, lines) == answer
        assert sample.counted == list(range(sample.prompt - 1, len(sample.ids) - 1))
        assert sample.prompt == sample.cell["length"] <= 512


@pytest.mark.parametrize("name", EXACT)
def test_the_tiny_checkpoints_tasks_are_in_its_language(name: str) -> None:
    words = Words()
    for sample in TASKS[name].samples(words, 6, 256, seed=3):
        ids = sample.ids
        assert ids[0] == tiny.BOS
        assert ids[sample.prompt - 2] == tiny.ASK
        who, thing = ids[sample.prompt - 1 :]
        stated = Counter(b for a, b in pairwise(ids[: sample.prompt - 1]) if a == who)
        assert stated.most_common(1)[0][0] == thing
        assert len(stated) == (2 if name == "duplicates" else 1)


def test_answers_vary_so_that_guessing_fails(text: Language) -> None:
    for name in EXACT:
        answers = Counter(parts(s)[2] for s in TASKS[name].samples(text, 30, 512, seed=0))
        assert max(answers.values()) <= 6, name


def test_samples_are_a_function_of_the_seed(text: Language) -> None:
    for task in TASKS.values():
        first, same, other = (task.samples(text, 3, 400, seed) for seed in (1, 1, 2))
        assert first == same
        assert [s.ids for s in first] != [s.ids for s in other]
        # With more samples the first ones stay the same.
        assert task.samples(text, 2, 400, 1)[:2] == first[:2]


@pytest.mark.parametrize("language", [Words(), Text(SMALL, SOURCE)], ids=["words", "text"])
def test_the_needle_stands_at_its_depth(language: Language) -> None:
    samples = TASKS["needle"].samples(language, 20, 400, seed=0)
    cells = {(length, depth): 4 for length in (100, 200, 400) for depth in (0, 0.25, 0.5, 0.75, 1)}
    assert Counter((s.cell["length"], s.cell["depth"]) for s in samples) == cells
    for sample in samples:
        answer = sample.ids[sample.prompt]
        place = sample.ids[: sample.prompt].index(answer) / sample.prompt
        # Sentences differ in length, and the question takes its share at the end.
        assert place == pytest.approx(sample.cell["depth"], abs=0.25)


def test_a_prompt_that_cannot_hold_its_statements_is_refused(text: Language) -> None:
    with pytest.raises(ValueError, match="do not fit 16 tokens"):
        TASKS["duplicates"].samples(text, 1, 16, 0)


def test_texts_evaluate_the_positions_that_can_be_predicted(text: Language) -> None:
    (sample,) = TASKS["text"].samples(text, 1, 300, 0)
    assert len(sample.ids) == sample.prompt == 300
    assert sample.counted == list(range(150, 299))
    (sample,) = TASKS["text"].samples(Words(), 1, 300, 0)
    for p in sample.counted:
        assert sample.ids[p - 1] == tiny.ASK
        assert sample.ids[p + 1] in tiny.THING_IDS


def test_the_library_is_split_once_and_for_all() -> None:
    train, held_out = library_sources(False), library_sources(True)
    assert train
    assert held_out
    assert not {p.split("/")[0].removesuffix(".py") for p in train} & {
        p.split("/")[0].removesuffix(".py") for p in held_out
    }
    assert is_held_out("asyncio")
    assert not is_held_out("json")
    assert not any("test" in path.split("/") for path in (*train, *held_out))


def test_languages_are_distinguished_by_the_vocabulary() -> None:
    assert isinstance(language_of(Tokenizer.from_folder(TINY_CHECKPOINT)), Words)
    assert isinstance(language_of(SMALL, SOURCE), Text)
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        language_of(None)
    with pytest.raises(UsageError, match="is empty"):
        language_of(SMALL, "\n")


def test_wilsons_interval() -> None:
    # Closed form at the ends, z^2 / (n + z^2), and a textbook case.
    z2 = 1.959964**2
    assert share(0, 10).high == pytest.approx(z2 / (10 + z2))
    assert share(10, 10).low == pytest.approx(10 / (10 + z2))
    assert (share(8, 10).low, share(8, 10).high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    with pytest.raises(ValueError, match="3 hits of 2"):
        share(3, 2)


def test_bootstrap_intervals_have_their_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    estimates = [mean(rng.exponential(size=60), seed=i) for i in range(200)]
    covered = sum(e.low <= 1.0 <= e.high for e in estimates)
    assert 175 <= covered <= 199
    assert mean([2.0, 2.0]) == mean([2.0, 2.0], seed=9)
    assert math.isnan(mean([1.0, math.inf]).low)
    with pytest.raises(ValueError, match="nothing"):
        mean([])


def jsonl(path: Path, *rows: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_ruler_is_scored_by_the_share_of_right_answers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no task of RULER"):
        read_ruler(tmp_path)
    jsonl(tmp_path / "niah_multivalue" / "validation.jsonl", {"index": 0, "input": "A prompt", "outputs": ["12", "34"]})
    jsonl(
        tmp_path / "qa_1" / "validation.jsonl", {"index": 0, "input": "A prompt", "outputs": ["Paris", "paris, France"]}
    )
    suites = read_ruler(tmp_path)
    assert suites["ruler/niah_multivalue"][0].score("it is 34.") == 0.5
    assert suites["ruler/niah_multivalue"][0].max_new_tokens == 128
    assert suites["ruler/qa_1"][0].score("In PARIS") == 1
    (tmp_path / "qa_1" / "validation.jsonl").write_text("{]")
    with pytest.raises(UsageError, match=r"validation\.jsonl:1 is no JSON"):
        read_ruler(tmp_path)
