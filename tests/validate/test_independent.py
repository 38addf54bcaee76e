"""Tests of the independent run: a tie may separate it from PyTorch's run, but not a wrong merge or a wrong state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvexport.validate.independent import IndependentRun, WatchedState
from kvexport.validate.runner import validate_artifact
from kvexport.validate.sections import summary

LENGTH = 160


def watched(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    merge, count = WatchedState.merge, [0]

    def altered(self: WatchedState, first: int, last: int) -> None:
        count[0] += 1
        if count[0] == 3:
            change(self, first, last, merge)
        else:
            merge(self, first, last)

    monkeypatch.setattr(WatchedState, "merge", altered)


def set_state(state: WatchedState, tensors: dict[str, NDArray[Any]]) -> None:
    lanes = len(next(iter(tensors.values())))
    for lane in range(lanes):
        state.write(lane, {name: x[lane] for name, x in tensors.items()})


def test_a_sound_run_parts_nowhere(tiny_artifact: Path) -> None:
    result = validate_artifact(tiny_artifact, length=LENGTH)
    assert result.passed and not result.parted
    assert result.own_compared > 30
    assert "lane" not in summary(result)["independent run"]


def test_a_wrong_selection_of_the_independent_run_is_detected(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that evicts a wrong entry is found."""

    def change(self: WatchedState, first: int, last: int, merge: Any) -> None:
        before = self.get_state()
        wrong = {name: x.copy() for name, x in before.items()}
        for name, x in wrong.items():
            if name.endswith(".score"):
                x[first] = np.ascontiguousarray(x[first][..., ::-1])
        set_state(self, wrong)
        merge(self, first, last)
        self.merges[-1] = self.merges[-1]._replace(past={name: x[first:last] for name, x in before.items()})

    watched(monkeypatch, change)
    result = validate_artifact(tiny_artifact, length=LENGTH)
    assert not result.passed and result.mismatch is not None
    assert result.mismatch.phase == "independent run"


def merge_reversed_scores(self: WatchedState, first: int, last: int, merge: Any) -> None:
    """Merge after the scores of lane `first` were reversed, so that other slots are evicted."""
    wrong = self.get_state()
    for name, x in wrong.items():
        if name.endswith(".score"):
            x[first] = np.ascontiguousarray(x[first][..., ::-1])
    set_state(self, wrong)
    merge(self, first, last)


def test_a_wrong_state_before_a_merge_does_not_pass_for_a_tie(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(monkeypatch, merge_reversed_scores)
    result = validate_artifact(tiny_artifact, length=LENGTH)
    assert not result.passed and result.mismatch is not None
    assert (result.mismatch.phase, result.mismatch.tensor) == ("independent run", "score")


def test_a_wrong_target_that_changes_no_votes_is_detected(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target with the most votes keeps them: only its key and value show that another entry merged into it."""

    def change(self: WatchedState, first: int, last: int, merge: Any) -> None:
        merge(self, first, last)
        wrong = self.get_state()
        name = next(name for name in wrong if name.endswith(".1.key"))
        wrong[name][first, 0, 5] += 0.01 * np.abs(wrong[name][first, 0, 5]).max()
        set_state(self, wrong)
        self.merges[-1] = self.merges[-1]._replace(
            present={name.replace("past_key_values.", "present."): x[first:last] for name, x in wrong.items()}
        )

    watched(monkeypatch, change)
    result = validate_artifact(tiny_artifact, length=LENGTH)
    assert result.parted and not result.passed and result.mismatch is not None
    assert (result.mismatch.phase, result.mismatch.layer) == ("independent run", 1)
    assert result.mismatch.tensor in ("key", "value")


def test_pytorch_follows_the_engine_where_a_tie_parts_them(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another selection, which counts as a tie here, ends no comparison: the logits after it are compared too."""
    monkeypatch.setattr(IndependentRun, "unexplained", lambda *_: iter(()))
    watched(monkeypatch, merge_reversed_scores)
    result = validate_artifact(tiny_artifact, length=LENGTH)
    assert result.parted and result.own_compared > 30
    assert result.passed, result.problem
    assert "PyTorch goes on from the engine's caches" in summary(result)["independent run"]
