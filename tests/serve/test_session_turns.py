"""Turns of sessions beside kills, full disks and other turns: a short run of the benchmark."""

from pathlib import Path

import pytest

from benchmarks.correctness.session_turns import run


@pytest.mark.parametrize("servers", [1, 2])
def test_no_acknowledged_turn_is_lost(tiny_artifact: Path, servers: int) -> None:
    result = run(tiny_artifact, turns=60, count=servers, every=20)
    assert result["lost"] == 0, result["examples"]
    assert result["acknowledged"] >= 60 and result["kills"] and result["full disks"]
