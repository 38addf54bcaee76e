"""The lm-evaluation-harness adapter scores as Hugging Face does if the cache holds everything.

If the harness is not installed, a fake provides the parts that the adapter uses.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvexport
from kvexport.evaluate.reference import log_softmax
from tests.support import fake_lm_eval
from tests.support.models import hugging_face_logits
from tests.support.tiny_model import ALPHABET

HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(
    not HARNESS, reason="not reached: lm-evaluation-harness (pip install 'kvexport[eval]')"
)
if not HARNESS:
    fake_lm_eval.install()


@pytest.fixture(scope="module", params=["all", "last"])
def model(request: pytest.FixtureRequest, tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from kvexport.evaluate.lm_eval_model import KvexportLM

    settings = ["cache.method=full", f"export.logits={request.param}", "limits.max_length=64"]
    return KvexportLM(kvexport.build(tiny_recipe, tmp_path_factory.mktemp("lm") / "artifact", settings), batch_size=2)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=a) for a in arguments]


def test_continuations_are_scored_as_hugging_face_does(model: Any, tiny_checkpoint: Path) -> None:
    pairs = [("abcde", "fgh"), ("Zz9 ", "qrs tuv"), ("hello", " w")]
    scores = model.loglikelihood(requests(*pairs))
    for (context, continuation), (score, greedy) in zip(pairs, scores, strict=True):
        ids = np.array([ALPHABET.index(c) for c in context + continuation])
        (logits,) = hugging_face_logits(tiny_checkpoint, [ids])
        start = len(context.rstrip())  # a space at the end is scored with the text that follows it
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


def test_lm_eval_creates_the_model_by_name_and_arguments(model: Any) -> None:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import get_model

    assert get_model("kvexport") is type(model)
    assert isinstance(model, LM)
    # The call of `lm_eval --model kvexport --model_args artifact=...,threads=1 --batch_size auto`.
    adapter = get_model("kvexport").create_from_arg_obj(
        {"artifact": str(model.engine.path), "threads": 1}, {"batch_size": "auto", "device": None}
    )
    assert adapter.batch == adapter.engine.max_batch


def test_a_context_without_room_loses_its_beginning(model: Any) -> None:
    context = "abcdefgh" * 20
    (whole,), (cut,) = (model.generate_until(requests((c, {"max_gen_toks": 4}))) for c in (context, context[-60:]))
    assert whole == cut
    (long,), (short,) = (model.loglikelihood(requests((c, "xyz"))) for c in (context, context[-61:]))
    assert long == short


@needs_harness
def test_the_fake_has_the_interface_of_lm_eval() -> None:
    from lm_eval.api import model, registry

    assert fake_lm_eval.LM.__abstractmethods__ == model.LM.__abstractmethods__
    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (getattr(fake_lm_eval.LM, name), getattr(model.LM, name))
        for name in (*model.LM.__abstractmethods__, "create_from_arg_obj")
    ]
    pairs += [(fake_lm_eval.register_model, registry.register_model), (fake_lm_eval.get_model, registry.get_model)]
    for fake, reference in pairs:
        assert list(inspect.signature(fake).parameters) == list(inspect.signature(reference).parameters), (
            reference.__qualname__
        )
    with pytest.raises(ValueError, match="Attempted to load model 'nothing'"):
        registry.get_model("nothing")


ROWS: list[dict[str, Any]] = [
    {"question": "abcde", "choices": ["fgh", "zzz"], "label": 0},
    {"question": "hello", "choices": ["xyz", " wor"], "label": 1},
]


def local_rows(**_: Any) -> Any:
    """Return a data set as the harness takes it from a function, so that nothing is downloaded."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return {"test": Dataset(InMemoryTable(pyarrow.Table.from_pylist(ROWS)), fingerprint="local")}


@needs_harness
def test_lm_eval_evaluates_the_model_offline(model: Any) -> None:
    import lm_eval
    from lm_eval.api.task import ConfigurableTask

    task = ConfigurableTask(
        config={
            "task": "local",
            "custom_dataset": local_rows,
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}],
        }
    )
    accuracy = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)["results"]["local"]["acc,none"]
    likelier = []
    for row in ROWS:
        scores = model.loglikelihood(requests(*((row["question"], choice) for choice in row["choices"])))
        likelier.append(int(np.argmax([score for score, _ in scores])) == row["label"])
    assert accuracy == np.mean(likelier)
