"""`benchmarks/gpu_check.py` over the kernels compiled for the host: its own code, no figure of which means anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not shutil.which("g++"), reason="not reached: g++ was not found")
@pytest.mark.parametrize("flags", [[], ["--stand-in"]], ids=["pydantic", "without-pydantic"])
def test_every_part_runs_and_is_reported(tmp_path: Path, flags: list[str]) -> None:
    parts = "build,repeat,memcheck,bandwidth,decode,prefill,merge" if flags else "build,conformance,merge"
    done = check("--on-host", "--parts", parts, "--out", str(tmp_path), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "check.json").read_text())
    outcomes = {name: part["status"] for name, part in report["parts"].items()}
    assert outcomes == dict.fromkeys(parts.split(","), "passed") | ({"memcheck": "skipped"} if flags else {})
    if not flags:
        assert report["parts"]["conformance"]["figures"]["cases"] > 60
    assert "Merge" in (tmp_path / "check.html").read_text()


def test_a_part_that_has_no_time_left_is_skipped_and_said(tmp_path: Path) -> None:
    done = check("--on-host", "--parts", "bandwidth", "--minutes", "0", "--out", str(tmp_path))
    assert done.returncode == 0
    assert "no time was left" in done.stdout


@pytest.mark.skipif(not shutil.which("g++"), reason="not reached: g++ was not found")
def test_a_failing_part_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import sys\nif 'repeat' in sys.argv: raise SystemExit('a part that fails')\n")
    done = check("--on-host", "--parts", "build,repeat,bandwidth", "--out", str(tmp_path))
    assert done.returncode == 4, done.stdout + done.stderr
    parts = json.loads((tmp_path / "check.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["passed", "failed", "passed"]
    assert "a part that fails" in parts["repeat"]["why"]


def test_without_a_gpu_nothing_is_claimed() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so nothing is refused here: make gpu-check")
    done = check()
    assert done.returncode == 3
    assert "nothing was checked" in done.stderr
