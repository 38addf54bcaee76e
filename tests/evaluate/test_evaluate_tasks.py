"""Tests of the tasks, of RULER's scores and of the intervals."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from kvexport.errors import UsageError
from kvexport.evaluate import tiny_language as tiny
from kvexport.evaluate.corpus import is_held_out, library_sources
from kvexport.evaluate.language import Language, Text, Words, language_of
from kvexport.evaluate.statistics import mean
from kvexport.evaluate.suites import read_ruler
from kvexport.evaluate.tasks import TASKS, make_samples
from kvexport.language.tokenizer import Tokenizer
from tests.support.recipes import SMALL_CHECKPOINT, TINY_CHECKPOINT

SMALL = Tokenizer.from_folder(SMALL_CHECKPOINT)
SOURCE = "\n".join(f"def function_{i}(x):\n    return x + {i}\n" for i in range(400))


@pytest.fixture(scope="module")
def text() -> Language:
    return Text(SMALL, SOURCE)


def test_samples_are_a_function_of_the_seed(text: Language) -> None:
    for task in TASKS:
        first, same, other = (make_samples(task, text, 3, 400, seed) for seed in (1, 1, 2))
        assert first == same
        assert [s.ids for s in first] != [s.ids for s in other]
        # With more samples the first ones stay the same.
        assert make_samples(task, text, 2, 400, 1)[:2] == first[:2]


def test_texts_evaluate_the_positions_that_can_be_predicted(text: Language) -> None:
    (sample,) = make_samples("text", text, 1, 300, 0)
    assert len(sample.ids) == sample.prompt == 300
    assert sample.counted == list(range(150, 299))
    (sample,) = make_samples("text", Words(), 1, 300, 0)
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
