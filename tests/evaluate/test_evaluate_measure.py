"""Tests of eval's measurements of an engine, against Hugging Face's logits and closed forms."""

import math
from pathlib import Path

import numpy as np
import pytest

import kvexport
from kvexport.errors import UsageError
from kvexport.evaluate.measure import Judge, Outcome, Rows
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.suites import Item, run_items
from kvexport.evaluate.tasks import Sample
from tests.support.counted import counted_logits
from tests.support.models import hugging_face_logits


def judged(sample: Sample, logits: Rows, full: Rows | None) -> Outcome:
    """Return a judge's outcome for a sample's logits, which it takes in two pieces if there are several."""
    against = None if full is None else lambda first, count: log_softmax(full[first : first + count])
    judge = Judge(sample, against)
    for start, end in ((0, 1), (1, len(logits))):
        judge.take(start, log_softmax(logits[start:end]))
    return judge.outcome()


def test_a_divergence_is_the_closed_form() -> None:
    sample = Sample([0, 1], 1, [0])
    full, compressed = np.log(np.array([[0.25, 0.75]], np.float32)), np.log(np.array([[0.5, 0.5]], np.float32)) + 3
    outcome = judged(sample, compressed, full)
    assert outcome.kl[0] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert outcome.nll == pytest.approx(math.log(2))
    assert not outcome.agrees[0]


@pytest.fixture(scope="module")
def everything(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> kvexport.Engine:
    """An engine of the random model without compression, with the logits of every token."""
    settings = ["cache.method=full", "export.logits=all", "limits.max_length=128"]
    return kvexport.load(kvexport.build(tiny_recipe, tmp_path_factory.mktemp("all") / "artifact", settings))


def test_counted_logits_are_hugging_faces(everything: kvexport.Engine, tiny_checkpoint: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [
        Sample(rng.integers(0, 64, n).tolist(), prompt, counted)
        for n, prompt, counted in ((40, 40, [3, 17, 38]), (50, 44, [43, 44, 48]), (9, 1, [0, 7]))
    ]
    truth = hugging_face_logits(tiny_checkpoint, [np.array(s.ids) for s in samples])
    for sample, logits, whole in zip(samples, counted_logits(everything, samples), truth, strict=True):
        np.testing.assert_allclose(logits, whole[sample.counted], atol=2e-4)


def test_an_artifact_with_last_logits_has_no_figures_inside_a_prompt(tiny_recipe: Path, tmp_path: Path) -> None:
    engine = kvexport.load(
        kvexport.build(tiny_recipe, tmp_path / "artifact", ["cache.method=full", "limits.max_length=128"])
    )
    assert counted_logits(engine, [Sample([1, 2, 3, 4], 2, [1, 2])])[0].shape == (2, 64)
    with pytest.raises(UsageError, match="last token only"):
        counted_logits(engine, [Sample([1, 2, 3, 4], 4, [1])])


def test_prompts_that_leave_no_room_are_refused(everything: kvexport.Engine) -> None:
    seen: list[str] = []

    def score(text: str) -> float:
        seen.append(text)
        return float(len(text))

    short, long = "abc", "abcdefgh" * 30
    assert run_items(everything, [Item(short, 4, score), Item(short, 6, score)], batch=2) == [4.0, 6.0]
    assert seen[1] == everything.generate([short], max_new_tokens=6, do_sample=False)[0].text
    with pytest.raises(UsageError, match="leaves no room in 128"):
        run_items(everything, [Item(long, 4, score)], batch=1)
