"""Tests of the full cache's predictions on disk: they change only by a known rounding."""

from pathlib import Path

import numpy as np
import pytest

from kvexport.errors import EnvironmentProblem
from kvexport.evaluate import reference
from kvexport.evaluate.reference import STEPS, Reference, decode, encode, log_softmax

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
    kept = Reference(tmp_path, "text", [40, 56], LOGS.shape[1])
    kept.put(1, 0, LOGS[40:96])
    kept.put(0, 16, LOGS[16:40])
    kept.put(0, 0, LOGS[:16])
    assert (kept.logs(0, 3, 30) == decode(encode(LOGS[3:33]))).all()
    assert (kept.logs(1, 6, 50) == decode(encode(LOGS[46:]))).all()


def test_a_full_disk_is_named_before_anything_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reference.os, "posix_fallocate", full)
    with pytest.raises(EnvironmentProblem, match=r"take 960 kB in .*: No space left on device\n  fix: TMPDIR=DIR"):
        Reference(tmp_path, "text", [40, 56], LOGS.shape[1])
