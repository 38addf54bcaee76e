"""Tests of recall: questions to copies of one cache, and the layers on which recall depends."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import kvexport
from benchmarks.quality.recall import answers
from kvexport.engine.engine import Engine
from kvexport.evaluate.recall import Passage, passage
from kvexport.recipe.load import load_recipe

FACTS = [
    ("anna lamp .", "? anna", "lamp"),
    ("boris guitar .", "? boris", "guitar"),
    ("carla piano .", "? carla", "piano"),
]
LENGTH = 160


def engine_of(folder: Path, recipe: str, *settings: str) -> Engine:
    built = load_recipe(recipe, ["limits.max_length=256", "limits.max_batch=4", *settings]).recipe
    return kvexport.load(kvexport.build(built, folder), threads=1)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_of(tmp_path_factory.mktemp("full") / "a", "tiny-full")


def text(engine: Engine) -> Passage:
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    filler = ["then many came ."] * 60
    return passage(encode, filler, FACTS, LENGTH, np.random.default_rng(3))


def test_a_passage_has_each_fact_once_and_the_requested_length(full: Engine) -> None:
    passage = text(full)
    words = full.tokenizer.decode(passage.ids)
    assert all(words.count(fact.removesuffix(" .")) == 1 for fact, _, _ in FACTS)
    assert LENGTH - 6 < len(passage.ids) <= LENGTH
    assert [full.tokenizer.decode(q.answer).strip() for q in passage.questions] == [answer for _, _, answer in FACTS]
    assert all(q.digits == len(q.answer) for q in passage.questions)


def test_the_full_cache_answers_known_and_unknown_questions_alike(full: Engine) -> None:
    passage = text(full)
    unknown, known = answers(full, passage), answers(full, passage, known=True)
    assert all(a.exact and a.digits == 1.0 for a in unknown)
    np.testing.assert_allclose([a.nll for a in known], [a.nll for a in unknown], atol=1e-4)


def test_a_large_budget_equals_the_full_cache_and_a_small_one_does_not(full: Engine, tmp_path: Path) -> None:
    passage = text(full)
    expected = [a.nll for a in answers(full, passage)]
    roomy = engine_of(tmp_path / "roomy", "tiny-base", "cache.method=h2o", "cache.budget=200")
    np.testing.assert_allclose([a.nll for a in answers(roomy, passage)], expected, atol=1e-5)
    small = engine_of(tmp_path / "small", "tiny-base", "cache.method=streaming", "cache.budget=24")
    assert np.mean([a.nll for a in answers(small, passage)]) > np.mean(expected) + 0.5


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_a_known_question_is_answered_as_after_one_chunk_of_passage_and_question(
    method: str, full: Engine, tmp_path: Path
) -> None:
    """Scores with a window count a call's last queries, so they equal those of one call."""
    passage = text(full)
    engine = engine_of(
        tmp_path / "one", "tiny-base", f"cache.method={method}", "cache.budget=40", "export.prefill_chunk=240"
    )
    for question, answer in zip(passage.questions, answers(engine, passage, known=True), strict=True):
        lanes = engine.lanes(1)
        row = lanes.prefill([np.array(passage.ids + question.ids)])[0].astype(np.float64)
        nll = np.log(np.exp(row - row.max()).sum()) + row.max() - row[question.answer[0]]
        assert len(question.answer) == 1
        assert answer.nll == pytest.approx(nll, abs=1e-3)
