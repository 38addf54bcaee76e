"""Tests of the full cache's predictions on disk: they change only by a known rounding, and are complete or absent."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvexport.commands.errors import report
from kvexport.evaluate.reference import STEPS, Reference, References, decode, encode, log_softmax
from tests.support.disks import full_disk

RNG = np.random.default_rng(0)
# Logits of a peaked, a flat and a nearly certain distribution.
LOGITS = RNG.normal(0, 1, (96, 5000)) * np.repeat([4.0, 0.5, 12.0], 32)[:, None]
LOGS = log_softmax(LOGITS)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (np.exp(p) * (p - q)).sum(-1)


def test_a_prediction_is_kept_to_half_a_thousandth_of_a_nat() -> None:
    kept = decode(encode(LOGS))
    seen = LOGS > -31
    assert np.abs(kept - LOGS)[seen].max() < 1 / STEPS
    assert np.exp(kept).sum(-1) == pytest.approx(1.0)
    assert (kept[~seen] < -30.9).all()
    assert (divergence(LOGS, kept) < 1e-7).all()


def test_a_mean_divergence_changes_by_less_than_a_hundred_thousandth() -> None:
    for noise in (0.0, 0.05, 0.5, 3.0):
        other = log_softmax(LOGITS + noise * RNG.normal(0, 1, LOGITS.shape))
        exact, rounded = divergence(LOGS, other), divergence(decode(encode(LOGS)), other)
        assert abs(exact.mean() - rounded.mean()) < 1e-5 * max(1.0, exact.mean())
        spread = (np.exp(LOGS) * np.abs(LOGS - other - exact[:, None])).sum(-1)
        assert (np.abs(exact - rounded) < spread / STEPS + 1e-7).all()


def test_the_likeliest_token_stays_so() -> None:
    near = np.log(np.array([[0.3, 0.3 + 1e-9, 0.3 - 1e-9, 0.1], [1.0, 1e-30, 1e-30, 1e-30]]))
    assert decode(encode(near)).argmax(-1).tolist() == [1, 0]
    assert (decode(encode(LOGS)).argmax(-1) == LOGS.argmax(-1)).all()


def test_rows_are_read_back_unchanged_in_any_order(tmp_path: Path) -> None:
    references, counts = References(tmp_path, LOGS.shape[1]), [40, 56]
    assert references.open("key", counts) is None
    with references.write("key", counts) as writer:
        writer.put(1, 0, LOGS[40:96])
        writer.put(0, 16, LOGS[16:40])
        writer.put(0, 0, LOGS[:16])
    kept = references.open("key", counts)
    assert isinstance(kept, Reference)
    assert (kept.logs(0, 3, 30) == decode(encode(LOGS[3:33]))).all()
    assert (kept.logs(1, 6, 50) == decode(encode(LOGS[46:]))).all()
    assert references.open("another", counts) is None
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".logs"]


def test_an_interrupted_run_leaves_no_file(tmp_path: Path) -> None:
    references = References(tmp_path, LOGS.shape[1])
    with pytest.raises(KeyboardInterrupt), references.write("key", [96]) as writer:
        writer.put(0, 0, LOGS)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_killed_before_the_digest_is_written_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = References(tmp_path, LOGS.shape[1])
    for killed in (False, True):
        if killed:
            monkeypatch.setattr(References, "_digest", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) if killed else nullcontext(), references.write("key", [96]) as writer:
            writer.put(0, 0, LOGS[:: -1 if killed else 1])
    monkeypatch.undo()
    assert references.path("key").exists() and references.open("key", [96]) is None


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    references = References(tmp_path, LOGS.shape[1])
    with full_disk(), pytest.raises(OSError, match="No space left") as caught, references.write("key", [96]) as writer:
        writer.put(0, 0, LOGS)
    assert report(caught.value) == 3
    assert f"disk full while writing {references.path('key')}: No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
