"""Tests of `tools/gpu_check` over the kernels compiled for the host."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def check(*arguments: str, program: str = "tools.gpu_check") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", program, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.skipif(not shutil.which("g++"), reason="not reached: g++ was not found")
@pytest.mark.parametrize("flags", [[], ["--stand-in"]], ids=["pydantic", "without-pydantic"])
def test_every_part_runs_and_is_reported(tmp_path: Path, flags: list[str]) -> None:
    parts = "build,repeat,memcheck,bandwidth,decode,prefill,merge" if flags else "build,conformance,merge,model"
    # The part `build` may have to compile the kernels. This takes minutes on a busy machine, and the default limit
    # would skip the remaining parts.
    options = ("--on-host", "--parts", parts, "--out", str(tmp_path), "--minutes", "60")
    done = check(*options, *flags, program="tests.support.forked_parts")
    assert done.returncode == (3 if flags else 0), done.stdout + done.stderr
    assert ("not checked: memcheck" in done.stdout) == bool(flags)
    report = json.loads((tmp_path / "check.json").read_text())
    outcomes = {name: part["status"] for name, part in report["parts"].items()}
    assert outcomes == dict.fromkeys(parts.split(","), "passed") | ({"memcheck": "skipped"} if flags else {})
    assert all(row["met"] is None for row in report["goals"] if row["measured"] is None)
    if not flags:
        assert report["parts"]["conformance"]["figures"]["cases"] > 60
        assert {row["figure"]: row["met"] for row in report["goals"]}[
            "Largest error against the float64 oracle, float16"
        ]


def test_figures_are_compared_with_their_goals() -> None:
    from tools.gpu_check import goals as gpu_goals

    def decode(nbytes: int, us: float, torch_us: float) -> dict[str, object]:
        row = {"bytes": nbytes, "us": us, "goal us": 10.0, "share of copy": 8.0 / us, "statistic": "log_ema"}
        return row | {"cache": "float16", "torch us": torch_us, "flashinfer us": None}

    step = {"ms": 4.0, "over the floor": 1.2, "merging over without": 1.02, "tokens per second": 100.0}
    prefill = [{"statistic": "none", "share of torch": 0.6}, {"statistic": "log_ema", "share of torch": 0.75}]
    figures = {
        "decode": {"rows": [decode(1 << 20, 9.0, 12.0), decode(1 << 27, 10.5, 10.0)]},
        "prefill": {"rows": prefill},
        "model": {
            "rows": [
                {"budget": 512, "batch": 1, **step},
                {"budget": 4096, "why": "it does not fit into this GPU's memory"},
            ],
            "methods": [
                {"method": name, **step, "tokens per second": speed}
                for name, speed in (("h2o", 100.0), ("keepkv", 98.0))
            ],
            "largest batch": [
                {"cache": "keepkv", "slots": 1024, **step},
                {"cache": "flash", "slots": 4096, "ms": 9.0, "tokens per second": 25.0},
            ],
        },
        "repeat": {"runs": 3},
    }
    parts = {
        name: {"status": "passed", "seconds": 1.0, "figures": part_figures} for name, part_figures in figures.items()
    }
    goals = gpu_goals.goals(parts)
    met = {row["figure"]: row["met"] for row in goals}
    assert [figure for figure, yes in met.items() if yes is False] == [
        "Decode, layers of 64 MB and more: share of the copy bandwidth",
        "Decode: PyTorch's flash attention over ours",
        "Runs of the same bits",
    ]
    assert [figure for figure, yes in met.items() if yes] == [
        "Decode, smaller layers: over bytes / (0.85 bandwidth) + 5 us",
        "Prefill of 512 against 2048 slots with statistics: share of PyTorch's flash attention",
        "Llama-2-7B's shape: a step over the time of its bytes",
        "A step with merging every 32 over one without",
        "Throughput: keepkv over h2o",
    ]
    assert next(row["measured"] for row in goals if "over flash" in row["figure"]) == 4.0
    assert next(row["goal"] for row in goals if "time of its bytes" in row["figure"]) == "at most 1.2"


def test_a_part_without_time_left_is_skipped_with_a_reason(tmp_path: Path) -> None:
    done = check("--on-host", "--parts", "bandwidth", "--minutes", "0", "--out", str(tmp_path))
    assert done.returncode == 3
    assert "no time was left" in done.stdout and "not checked: bandwidth" in done.stdout


@pytest.mark.skipif(not shutil.which("g++"), reason="not reached: g++ was not found")
def test_a_failing_part_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'repeat' in sys.argv: raise SystemExit('a part that fails')\n"
    )
    done = check("--on-host", "--parts", "build,repeat,bandwidth", "--out", str(tmp_path))
    assert done.returncode == 4, done.stdout + done.stderr
    parts = json.loads((tmp_path / "check.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["passed", "failed", "passed"]
    assert "a part that fails" in parts["repeat"]["why"]


def test_without_a_gpu_nothing_is_claimed() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("not reached: there is a GPU, so nothing is refused (make gpu-check)")
    done = check()
    assert done.returncode == 3
    assert "nothing was checked" in done.stderr
