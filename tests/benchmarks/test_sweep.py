"""A sweep continues where it stopped: it discards rows with other options, and measures no other row again."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import common
from benchmarks.quality import sweep
from kvexport.evaluate.result import Options, Result, Score

ASKED = Options(("streaming", "keepkv"), (0.125,), ("text",), samples=2, length=64)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []

    class Noted:
        def __init__(self, recipe: str, settings: list[str], options: Options, folder: Path, progress: Any) -> None:
            assert folder.is_dir()
            pairs = [(label, budget) for budget in options.budgets for label in options.methods]
            self.settings = [SimpleNamespace(label=label, budget=budget) for label, budget in pairs]

        def full(self) -> Result:
            return Result("full", None, 64, 1)

        def measure(self, setting: Any) -> Result:
            noted.append(f"{setting.label} {setting.budget:g}")
            score = Score("text", samples={"kl": (1 / 3, 2.0)})
            return Result(setting.label, setting.budget, 8, 1, {"text": score})

    monkeypatch.setattr(sweep, "Run", Noted)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return noted


def run(
    options: Options = ASKED, settings: tuple[str, ...] = (), text: str = "source", only: Sequence[str] = ()
) -> Any:
    sweep.Sweep("tiny-base", list(settings), None).run("methods", options, only, text)
    return json.loads((common.RESULTS / "sweep-tiny-base.json").read_text())["groups"]["methods"]


def test_existing_results_are_not_measured_again(measured: list[str]) -> None:
    assert [r["label"] for r in run(only=["keepkv"])["rows"]] == ["keepkv"]
    group = run()
    assert [r["label"] for r in group["rows"]] == ["streaming", "keepkv"]
    assert group["rows"][0]["scores"]["text"] == {"kl": None, "accuracy": None}
    run()
    assert measured == ["keepkv 0.125", "streaming 0.125"]


def test_samples_are_kept_for_the_model_whose_tables_pair_them() -> None:
    score = Score("text", samples={"kl": (1 / 3, 2.0), "nll": (4.0, 5.0)})
    result = Result("keepkv", 0.125, 8, 1, {"text": score})
    assert sweep.row(result, paired=True)["scores"]["text"]["samples"] == {"kl": [0.333333, 2.0]}
    assert "samples" not in sweep.row(result, paired=False)["scores"]["text"]


def test_another_budget_is_added(measured: list[str]) -> None:
    run()
    more = Options(("streaming", "keepkv"), (0.05,), ("text",), samples=2, length=64)
    group = run(more)
    assert group["budgets"] == [0.05, 0.125]
    assert [(r["budget"], r["label"]) for r in group["rows"]] == [
        (budget, label) for budget in (0.05, 0.125) for label in ("streaming", "keepkv")
    ]
    assert len(measured) == 4


@pytest.mark.parametrize("change", [{"settings": ("backend.threads=1",)}, {"text": "Python's manual"}])
def test_results_of_other_settings_are_measured_again(change: Any, measured: list[str]) -> None:
    run()
    measured.clear()
    run(**change)
    assert measured == ["streaming 0.125", "keepkv 0.125"]
