"""Tests of the measurement of an artifact's speed, and of refusals for lack of room."""

import json
from pathlib import Path

import pytest

from kvexport.bench import measure, sections
from kvexport.engine.load import load
from kvexport.report import render_text
from tests.support import command_line


def test_every_batch_and_context_is_measured(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact, threads=1)
    result = measure(engine, "tiny", batches=(1, 3), contexts=(5, 40), steps=6, rounds=2)
    assert [r["context"] for r in result["prefill"]] == [5, 40]
    assert [(r["context"], r["batch"]) for r in result["decode"]] == [(5, 1), (5, 3), (40, 1), (40, 3)]
    for row in result["decode"]:
        assert 0 < row["step"]["p50"] <= row["step"]["p99"] <= row["step"]["max"]
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["step"]["mean"] * 1e3, rel=0.01)
    assert result["cache_bytes"] == engine.plan.bytes(1)
    assert not engine.busy
    json.dumps(result)
    assert "Decoding" in render_text(sections(result))


@pytest.mark.parametrize(("words", "named"), [
    (["--context", "100000"], "the artifact takes"), (["--context", "9", "--batch", "1,900"], "a batch of 900"),
    (["--batch", "0"], "--batch is '0'"), (["--context", "a,b"], "--context is 'a,b'"),
])  # fmt: skip
def test_impossible_measurements_are_refused(tiny_artifact: Path, words: list[str], named: str) -> None:
    assert named in command_line.failure(2, "bench", tiny_artifact, *words)


def test_the_verb_prints_tables(tiny_artifact: Path) -> None:
    out = command_line.ok("bench", tiny_artifact, "--context", "5,9", "--steps", "3", "--rounds", "1")
    assert "tokens/s" in out
