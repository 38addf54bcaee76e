"""Tests of the independent run: a tie may separate it from PyTorch's run, but not a wrong merge or a wrong state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvexport.validate.independent import WatchedState
from kvexport.validate.runner import validate_artifact
from kvexport.validate.sections import summary

LENGTH = 160


def watched(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `change(state, first, last, merge)` replace the engine's third merge."""
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


def test_a_wrong_selection_of_the_run_alone_is_found(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that evicts a wrong entry is found.

    The scores of the state are reversed before the engine's merge, and restored in the record of that merge.
    """

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


def test_a_wrong_state_before_a_merge_does_not_pass_for_a_tie(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong state before a merge is not accepted as a tie: the merge is right, but the scores are not PyTorch's."""

    def change(self: WatchedState, first: int, last: int, merge: Any) -> None:
        wrong = self.get_state()
        for name, x in wrong.items():
            if name.endswith(".score"):
                x[first] = np.ascontiguousarray(x[first][..., ::-1])
        set_state(self, wrong)
        merge(self, first, last)

    watched(monkeypatch, change)
    result = validate_artifact(tiny_artifact, length=LENGTH)
    assert not result.passed and result.mismatch is not None
    assert (result.mismatch.phase, result.mismatch.tensor) == ("independent run", "score")
