"""Tests of eval: its figures are right, and a budget for everything equals the full cache."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvexport.commands.app import app
from kvexport.evaluate.result import Evaluation, Options
from kvexport.evaluate.runner import evaluate
from kvexport.evaluate.sections import sections
from kvexport.report import render_text

LENGTH = 192


SETTINGS = ["export.prefill_chunk=16"]
OPTIONS = Options(methods=("streaming",), budgets=(32, 256), tasks=("text", "decoded"), samples=10, length=LENGTH)


@pytest.fixture(scope="module")
def reported() -> list[str]:
    return []


@pytest.fixture(scope="module")
def evaluation(reported: list[str]) -> Evaluation:
    return evaluate("tiny-base", SETTINGS, OPTIONS, tell=reported.append)


def test_the_full_cache_recalls(evaluation: Evaluation) -> None:
    heads, size, other = 2, 2 * 32 * 4, 4 + 4 + 4  # keys and values; votes, score, position
    assert evaluation.full.bytes == 2 * heads * LENGTH * (size + other) + 8
    for score in evaluation.full.scores.values():
        assert score.nll.value < 0.1 and score.kl is None and score.accuracy is None


def test_a_budget_that_holds_everything_is_the_full_cache(evaluation: Evaluation) -> None:
    _, roomy = evaluation.results
    assert roomy.slots == 256
    for task, score in roomy.scores.items():
        full = evaluation.full.scores[task]
        assert score.kl.value < 1e-6
        assert score.agreement == 1.0
        assert score.nll.value == pytest.approx(full.nll.value, abs=1e-4)


def test_a_window_forgets_earlier_tokens(evaluation: Evaluation) -> None:
    small = evaluation.results[0]
    for score in small.scores.values():
        assert score.kl.low > 0.5 and score.nll.value > 1 and score.agreement < 0.9


def test_every_result_is_reported_when_it_is_measured(evaluation: Evaluation, reported: list[str]) -> None:
    full, small, roomy = reported
    rest = r"to go, about \d+ s"
    assert re.fullmatch(rf"full: text loss .*; 2 of 2 {rest}", full)
    assert re.fullmatch(rf"streaming, 32 slots: text KL .* \[.*\], .*; 1 of 2 {rest}", small)
    assert re.fullmatch(r"streaming, 256 slots: .*", roomy) and "to go" not in roomy


def test_the_report_shows_every_candidate(evaluation: Evaluation) -> None:
    tables = render_text(sections(evaluation))
    for words in ("streaming, 32 slots", "KL(full cache || method)", "decoded: Predict the second half"):
        assert words in tables
    assert "Perplexity and distance: text" in tables
    assert f"{evaluation.results[0].bytes:,}" in tables


def test_the_command_measures_the_requested_settings_and_prints_all_results(
    evaluation: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def answer(*arguments: Any) -> Evaluation:
        calls.extend(arguments)
        return evaluation

    monkeypatch.setattr("kvexport.evaluate.runner.evaluate", answer)
    (tmp_path / "book.txt").write_text("Once upon a time")
    arguments = [
        "--methods", "streaming,keepkv:threshold=0.7", "--budgets", "1/4,64", "--tasks", "decoded,text", "--samples",
        "5",
    ]  # fmt: skip
    arguments += ["--length", "64", "--seed", "7", "--batch", "3", "--text", f"{tmp_path}/book.txt"]
    result = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base", "--set", "cache.sinks=2", "--json", *arguments])
    assert result.exit_code == 0, result.output
    name, overrides, options, *_ = calls
    assert (name, overrides) == ("tiny-base", ["cache.sinks=2"])
    methods, budgets = ("streaming", "keepkv:threshold=0.7"), (0.25, 64.0)
    assert options == Options(methods, budgets, ("decoded", "text"), 5, 64, 7, 3, source="Once upon a time")
    data = json.loads(result.stdout)
    assert [r["slots"] for r in data["results"]] == [32, 256]
    assert data["full"]["scores"]["text"]["nll"]["count"] == 10
    default = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base"])
    assert default.exit_code == 0, default.output
    assert calls[7] == Options()
    assert "Perplexity and distance: text" in default.stdout


@pytest.mark.parametrize(("arguments", "words"), [
    (["--tasks", "needles"], "unknown task 'needles'"), (["--budgets", "3/2"], "'3/2' is no budget"),
    (["--length", "9" * 23], "--length"), (["--methods", "streaming:sinks"], "'sinks' is not a setting"),
    (["--methods", "nothing"], "unknown method 'nothing'"), (["--budgets", "4"], "cannot hold"),
    (["--text", "nowhere.txt"], "nowhere.txt cannot be read"), (["--ruler", "nowhere"], "holds no task of RULER"),
])  # fmt: skip
def test_impossible_settings_are_refused_before_a_build(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base", *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "building" not in result.stderr
