"""Tests of the small checkpoint's training: a resumed run equals one without a stop, and its result is what ships."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvexport.evaluate.tiny_language import NAMES, THINGS
from tests.support.recipes import SMALL_CHECKPOINT as SMALL


@pytest.fixture(scope="module")
def training() -> Iterator[ModuleType]:
    """The module small/train.py, with documents.py beside it."""
    for name, file in (("documents", "documents.py"), ("small_train", "train.py")):
        spec = importlib.util.spec_from_file_location(name, SMALL / file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    yield sys.modules["small_train"]
    for name in ("small_train", "documents", "tiny_checkpoint"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def data(training: ModuleType) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    lines = [tokenizer.encode(f"def function_{i}(x):\n", add_special_tokens=False).ids for i in range(200)]
    return training.Data(tokenizer, NAMES, THINGS, lines, lines)


def small_model(training: ModuleType) -> Any:
    """Return a model with the checkpoint's architecture and one narrow layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=training.VOCABULARY, tie_word_embeddings=True, **sizes))


def train(training: ModuleType, data: Any, state: Path, stops: list[int]) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Run 4 steps, stopped after each of `stops` with the state saved, and return the model, the run and the log."""

    class Stopped(Exception):
        pass

    for stop in stops:
        model, log, run = small_model(training), [], training.Run(0, 4, 1024, 1e-3, state, step=0, formed=None)
        advance = run._advance

        def step(
            model: Any, data: Any, steppers: Any, recent: Any, run: Any = run, advance: Any = advance, stop: int = stop
        ) -> None:
            advance(model, data, steppers, recent)
            if run.step == stop < 4:
                run._save(model, steppers, [{"step": stop}])
                raise Stopped

        run._advance = step
        try:
            run.train(model, data, log)
        except Stopped:
            continue
    return model, run, log


def test_a_resumed_run_is_the_run_that_was_not_stopped(training: ModuleType, data: Any, tmp_path: Path) -> None:
    whole, run, log = train(training, data, tmp_path / "whole", [4])
    resumed, other, continued = train(training, data, tmp_path / "resumed", [2, 4])
    assert (run.step, run.formed) == (other.step, other.formed) == (4, None)
    assert [r["step"] for r in log] == [4]
    assert [r["step"] for r in continued] == [2, 4]
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert (a == b).all(), name
    fresh = dict(small_model(training).named_parameters())
    assert all((p != fresh[name]).any() for name, p in whole.named_parameters() if p.ndim == 2)


def test_rows_have_the_requested_length_and_their_ids_as_labels(training: ModuleType, data: Any) -> None:
    kinds = set()
    for step in (10, 700, 1300, 1400, *range(2000, 2020)):
        kind, rows = training.batch_at(data, 0, step, None if step < 100 else 618, 2048)
        kinds.add(kind)
        length = len(rows[0][0])
        assert len(rows) == 2048 // length
        for ids, labels in rows:
            assert len(ids) == len(labels) == length
            counted = [(i, x % training.VOCABULARY) for i, x in zip(ids, labels, strict=True) if x != training.IGNORE]
            assert counted
            assert all(i == x for i, x in counted)
    assert kinds == {"copy", "code", "recall"}


def test_the_saved_checkpoint_equals_the_shipped_one(training: ModuleType, data: Any, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(SMALL, dtype=torch.float16)
    training.tiny.save(model, data.tokenizer, 2 * training.MAX_LENGTH, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (SMALL / "model.safetensors").read_bytes()
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((SMALL / name).read_text()), name
    assert np.isfinite(training.learning_rate(0, 2400, 1e-3))
