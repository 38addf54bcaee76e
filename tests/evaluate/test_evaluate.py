"""Tests of eval: its figures are right, a budget for everything equals the full cache, and saved results are reused."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.commands.app import app
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.evaluate.result import Evaluation, Options, Result, paired
from kvexport.evaluate.runner import Run, alone, evaluate
from kvexport.evaluate.sections import sections
from kvexport.evaluate.settings import Setting
from kvexport.evaluate.statistics import mean
from kvexport.evaluate.tasks import TASKS
from kvexport.report.page import render_html
from kvexport.report.text import render_text
from kvexport.terminal import silent

LENGTH = 192


SETTINGS = ["export.prefill_chunk=16"]
OPTIONS = Options(
    methods=("streaming",),
    budgets=(32, 256),
    tasks=("needle", "duplicates", "text"),
    samples=10,
    length=LENGTH,
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def reported() -> list[str]:
    """The lines that `evaluate` printed while `evaluation` was made."""
    return []


@pytest.fixture(scope="module")
def evaluation(work: Path, reported: list[str]) -> Evaluation:
    """The evaluation of the tiny trained model with streaming."""
    return evaluate("tiny-base", SETTINGS, OPTIONS, work, tell=reported.append)


def test_the_full_cache_recalls(evaluation: Evaluation) -> None:
    needle = evaluation.full.scores["needle"]
    assert needle.accuracy.value == 1.0
    assert needle.accuracy.count == 30
    assert needle.kl is None
    heads, size, other = 2, 2 * 32 * 4, 4 + 4 + 4  # keys and values; votes, score, position
    assert evaluation.full.bytes == 2 * heads * LENGTH * (size + other) + 8
    text = evaluation.full.scores["text"]
    assert text.nll.value < 0.1


def test_a_budget_that_holds_everything_is_the_full_cache(evaluation: Evaluation) -> None:
    _, roomy = evaluation.results
    assert roomy.slots == 256
    for task, score in roomy.scores.items():
        full = evaluation.full.scores[task]
        assert score.accuracy == full.accuracy
        assert score.kl.value < 1e-6
        assert score.agreement == 1.0
        assert score.nll.value == pytest.approx(full.nll.value, abs=1e-4)


def test_a_window_forgets_earlier_tokens(evaluation: Evaluation) -> None:
    small = evaluation.results[0]
    right = {(c.length, c.depth): c.right / c.samples for c in small.scores["needle"].cells}
    assert right[LENGTH, 1.0] == 1.0
    assert right[LENGTH, 0.25] == right[LENGTH, 0.5] == 0.0
    kl, accuracy = small.scores["needle"].kl, small.scores["needle"].accuracy
    assert kl.low > 0.5
    assert accuracy.value == sum(right.values()) / len(right)


def test_every_result_is_reported_when_it_is_measured(evaluation: Evaluation, reported: list[str]) -> None:
    full, small, roomy = reported
    rest = r"to go, about \d+ s"
    assert re.fullmatch(rf"full: needle 1 right, .*; 2 of 2 {rest}", full)
    assert re.fullmatch(rf"streaming, 32 slots: needle .* right KL .* \[.*\], .*; 1 of 2 {rest}", small)
    assert re.fullmatch(r"streaming, 256 slots: .*", roomy) and "to go" not in roomy


def test_all_engines_share_one_copy_of_the_weights(evaluation: Evaluation, work: Path) -> None:
    files = {path.parent.name: path for path in work.glob("*/decoder.weights")}
    assert files.keys() >= {"full", "streaming-32", "streaming-256"}
    assert len({path.stat().st_ino for path in files.values()}) == 1
    kvexport.load(work / "streaming-32", verify=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the labels and slots that would be measured. Nothing is measured from now on."""
    requested: list[str] = []

    def note(run: Run, setting: Setting, budget: float | None, _: object) -> Result:
        requested.append(f"{setting.label} {setting.slots}")
        run._seconds.append(120.0)
        return Result(setting.label, budget, setting.slots, setting.bytes)

    monkeypatch.setattr(Run, "_measure", note)
    return requested


def copied(work: Path, folder: Path) -> Path:
    """Copy the files with which a run can continue."""
    for name in ("results", "predictions"):
        shutil.copytree(work / name, folder / name)
    return folder


def test_stored_results_are_not_measured_again(
    evaluation: Evaluation, work: Path, tmp_path: Path, measured: list[str]
) -> None:
    lines: list[str] = []
    again = evaluate("tiny-base", SETTINGS, OPTIONS, copied(work, tmp_path), tell=lines.append)
    assert measured == []
    assert len(lines) == 3
    assert not any("to go" in text for text in lines)
    assert json.dumps(again.to_json()) == json.dumps(evaluation.to_json())


def test_a_killed_run_continues_with_the_missing_results(
    evaluation: Evaluation, work: Path, tmp_path: Path, measured: list[str]
) -> None:
    (lost,) = copied(work, tmp_path).glob("results/streaming-256-*.json")
    lost.unlink()
    lost.with_name(f".{lost.name}.0.part").write_text("{")  # the rest of an interrupted write
    other = tmp_path / "other" / ".file.part"  # of another program: --work may be a folder with much else
    other.parent.mkdir()
    other.touch()
    again = evaluate("tiny-base", SETTINGS, OPTIONS, tmp_path)
    assert measured == ["streaming 256"]
    assert json.dumps(asdict(again.results[0])) == json.dumps(asdict(evaluation.results[0]))
    assert lost.exists() and list(tmp_path.rglob("*.part")) == [other]


def test_a_new_method_is_measured_alone_and_a_changed_setting_again(
    evaluation: Evaluation, work: Path, tmp_path: Path, measured: list[str]
) -> None:
    run = Run("tiny-base", SETTINGS, replace(OPTIONS, methods=("streaming", "h2o")), copied(work, tmp_path), silent)
    for setting in run.settings:
        run.measure(setting)
    assert measured == ["h2o 32", "h2o 256"]
    for settings, options in (
        (["export.prefill_chunk=8"], OPTIONS),
        ([*SETTINGS, "cache.sinks=2"], OPTIONS),
        (SETTINGS, replace(OPTIONS, samples=11)),
        (SETTINGS, replace(OPTIONS, seed=1)),
    ):
        measured.clear()
        other = Run("tiny-base", settings, options, tmp_path, silent)
        other.measure(other.settings[0])
        assert measured == ["streaming 32"], (settings, options)


@pytest.mark.parametrize("name", ["results/streaming-32-*.json", "results/full-*.json", "predictions/full-*.logs"])
@pytest.mark.parametrize("damage", ["changed", "cut", "emptied"])
def test_a_damaged_file_is_named_with_the_line_that_mends_it(
    name: str, damage: str, evaluation: Evaluation, work: Path, tmp_path: Path, measured: list[str]
) -> None:
    path = next(iter(copied(work, tmp_path).glob(name)))
    data = bytearray(path.read_bytes())
    middle = next(i for i in range(len(data) // 2, len(data)) if path.suffix == ".logs" or chr(data[i]) in "2345678")
    data[middle] ^= 1
    path.write_bytes({"changed": bytes(data), "cut": bytes(data[: middle + 1]), "emptied": b""}[damage])
    with pytest.raises(UsageError, match=f"{path.name} is damaged: its digest does not match\n  fix: rm "):
        evaluate("tiny-base", SETTINGS, OPTIONS, tmp_path)
    assert measured == []


def test_a_disk_too_small_for_the_predictions_is_refused_before_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    monkeypatch.setattr("kvexport.evaluate.reference.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(EnvironmentProblem, match=r"take .* has 1 kB free\n  fix: --work DIR on another disk"):
        evaluate("tiny-base", SETTINGS, replace(OPTIONS, tasks=("text",)), tmp_path)
    assert measured == []


def test_a_folder_belongs_to_one_evaluation_at_a_time(tmp_path: Path, measured: list[str]) -> None:
    with (
        alone(tmp_path),
        pytest.raises(UsageError, match=r"another evaluation works in .*\n  fix: --work with another directory"),
    ):
        evaluate("tiny-base", SETTINGS, OPTIONS, tmp_path)
    assert measured == []
    with alone(tmp_path):
        pass


def test_differences_are_paired_sample_by_sample(evaluation: Evaluation) -> None:
    small, roomy = evaluation.results
    rival = replace(roomy, label="rival", budget=small.budget)
    (needle, *_) = differences = paired([small, rival, roomy], "streaming")
    assert [(d.label, d.budget, d.task, d.figure) for d in differences] == [
        ("rival", 32, task, figure)
        for task, figures in (("needle", ("kl", "accuracy")), ("duplicates", ("kl", "accuracy")), ("text", ("kl",)))
        for figure in figures
    ]
    here, there = rival.scores["needle"], small.scores["needle"]
    assert needle.difference.value == pytest.approx(here.kl.value - there.kl.value)
    each = np.array(here.samples["kl"]) - np.array(there.samples["kl"])
    assert needle.difference == mean(each)
    shown = replace(evaluation, results=[small, rival], differences=differences, against="streaming")
    text = render_text(sections(shown))
    assert "Paired differences to streaming" in text
    assert str(needle.difference) in text


def test_the_report_shows_every_candidate(evaluation: Evaluation) -> None:
    page = render_html("Evaluation", "", sections(evaluation))
    for words in (
        "streaming, 32 slots",
        "Accuracy: needle",
        "KL to the full cache: text",
        "needle: full",
    ):
        assert words in page
    tables = render_text(sections(evaluation))
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
        "--methods",
        "streaming,keepkv:threshold=0.7",
        "--budgets",
        "1/4,64",
        "--tasks",
        "needle,text",
        "--samples",
        "5",
    ]
    arguments += [
        "--length",
        "64",
        "--seed",
        "7",
        "--batch",
        "3",
        "--text",
        f"{tmp_path}/book.txt",
        "--against",
        "streaming",
        "--html",
        f"{tmp_path}/page.html",
    ]
    result = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base", "--set", "cache.sinks=2", "--json", *arguments])
    assert result.exit_code == 0, result.output
    name, overrides, options, work, *_ = calls
    assert (name, overrides, work) == ("tiny-base", ["cache.sinks=2"], None)
    methods, budgets = ("streaming", "keepkv:threshold=0.7"), (0.25, 64.0)
    assert options == Options(
        methods,
        budgets,
        ("needle", "text"),
        5,
        64,
        7,
        3,
        source="Once upon a time",
        against="streaming",
    )
    data = json.loads(result.stdout)
    assert [r["slots"] for r in data["results"]] == [32, 256]
    assert data["full"]["scores"]["needle"]["accuracy"]["count"] == 30
    assert data["full"]["scores"]["duplicates"]["cells"] == []
    assert "<svg" in (tmp_path / "page.html").read_text()
    default = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base"])
    assert default.exit_code == 0, default.output
    assert calls[8] == Options()
    assert "Perplexity and distance: text" in default.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "needles"], "unknown task 'needles'"),
        (["--budgets", "3/2"], "'3/2' is no budget"),
        (["--length", "9" * 23], "--length"),
        (["--methods", "streaming:sinks"], "'sinks' is not a setting"),
        (["--methods", "nothing"], "unknown method 'nothing'"),
        (["--budgets", "4"], "cannot hold"),
        (["--length", "16", "--tasks", "duplicates"], "the task duplicates at a length of 16"),
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--ruler", "nowhere"], "holds no task of RULER"),
        (["--html", "nowhere/page.html"], "does not exist"),
        (["--against", "keepkv", "--methods", "h2o,streaming"], "'keepkv' is not among the compared labels"),
    ],
)
def test_impossible_settings_are_refused_before_a_build(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["eval", "--recipe", "tiny-base", *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "building" not in result.stderr


def test_a_task_is_one_function() -> None:
    assert {"needle", "multikey", "associative", "duplicates", "text", "decoded"} == set(TASKS)
    assert all(task.summary.endswith((".", "?")) for task in TASKS.values())
