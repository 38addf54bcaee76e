"""The lm-evaluation-harness adapter scores what Hugging Face scores, where the cache holds everything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import hugging_face_logits
from tiny_model import ALPHABET

import kvexport
from kvexport.evaluate.measure import log_softmax

pytest.importorskip("lm_eval", reason="needs the extra eval")


@pytest.fixture(scope="module", params=["all", "last"])
def model(request: pytest.FixtureRequest, tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from kvexport.evaluate.lm_eval_model import KvexportLM

    settings = ["cache.method=full", f"export.logits={request.param}", "limits.max_length=64"]
    return KvexportLM(kvexport.build(tiny_recipe, tmp_path_factory.mktemp("lm") / "artifact", settings), batch_size=2)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=a) for a in arguments]


def test_continuations_are_scored_as_hugging_face_does(model: Any, tiny_checkpoint: Path) -> None:
    pairs = [("abcde", "fgh"), ("Zz9 ", "qrs tuv"), ("hello", " w")]
    found = model.loglikelihood(requests(*pairs))
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        ids = np.array([ALPHABET.index(c) for c in context + continuation])
        (logits,) = hugging_face_logits(tiny_checkpoint, [ids])
        start = len(context.rstrip())  # a space at the end is scored with what follows it
        rows = log_softmax(logits)[start - 1 : -1]
        truth = ids[start:]
        assert score == pytest.approx(rows[np.arange(len(truth)), truth].sum(), abs=1e-3)
        assert greedy == bool((rows.argmax(-1) == truth).all())


def test_the_greedy_continuation_is_called_greedy(model: Any) -> None:
    text = model.engine.generate("abcde", max_new_tokens=4, do_sample=False)[0].text
    ((_, greedy),) = model.loglikelihood(requests(("abcde", text)))
    assert greedy
    assert model.generate_until(requests(("abcde", {"max_gen_toks": 4, "until": []}))) == [text]
    assert model.generate_until(requests(("abcde", {"max_gen_toks": 4, "until": [text[1:3]]}))) == [text[:1]]


def test_a_text_is_scored_piece_by_piece(model: Any, tiny_checkpoint: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 2
    (score,) = model.loglikelihood_rolling(requests((text,)))
    ids = [ALPHABET.index(c) for c in text]
    expected = 0.0
    for piece in (ids[:63], ids[63:]):
        (logits,) = hugging_face_logits(tiny_checkpoint, [np.array([*model._start, *piece])])
        expected += log_softmax(logits)[np.arange(len(piece)), piece].sum()
    assert score == pytest.approx(expected, abs=1e-2)


def test_the_harness_runs_it_by_name(model: Any) -> None:
    from lm_eval.api.registry import get_model

    assert get_model("kvexport") is type(model)
