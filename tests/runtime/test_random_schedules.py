"""Forty random schedules; `benchmarks/schedules.py` runs a thousand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvexport.runtime.engine import load
from tests.support.schedules import Alone, Schedule

SCHEDULES, STEPS = 40, 20


@pytest.mark.usefixtures("no_sync")
def test_whatever_happens_to_requests_they_are_answered_as_alone(tiny_artifact: Path, tmp_path: Path) -> None:
    *engines, other = (load(tiny_artifact) for _ in range(3))
    alone, happened = Alone(other), Counter[str]()
    for seed in range(SCHEDULES):
        happened += Schedule(engines, alone, tmp_path / str(seed), seed).run(STEPS)
    assert min(happened[kind] for kind in ("answered", "fork", "cancel", "preempt", "resume", "turn", "expire")) > 10
