"""Builds, proves and measures the CUDA kernels on the GPU that is there: ``make gpu-check``.

    python benchmarks/gpu_check.py [--parts conformance,decode] [--minutes 7.5] [--on-host]

Takes nvcc, and a Python with PyTorch and numpy; nothing is fetched. A part that takes more is skipped, and says so, where that is missing.
Every part runs in a process of its own with a limit on its time, and one that fails is reported while the others go on. Writes
benchmarks/results/<gpu>/check.json and check.html; exit code 4 where a part failed. ``--on-host`` runs the same parts over the kernels
compiled for the host, to test this script: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "conformance"), str(ROOT / "benchmarks")]

# Seconds at the most. The build comes first: the others take its library.
PARTS = {
    "build": 150,
    "conformance": 60,
    "repeat": 45,
    "memcheck": 60,
    "racecheck": 60,
    "synccheck": 45,
    "bandwidth": 20,
    "decode": 70,
    "prefill": 40,
    "merge": 40,
    "onnxruntime": 120,
}
SANITIZERS = ("memcheck", "racecheck", "synccheck")
MISMATCH = 4
FIGURES = "figures: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=7.5, help="after which no part is started")
    parser.add_argument("--on-host", action="store_true")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/<gpu>")
    parser.add_argument("--stand-in", action="store_true", help="do without pydantic even where it is")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        stand_in_for_pydantic(always=options.stand_in)
        run_part(options.part, on_host=options.on_host)
        return
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    gpu = {"name": "host"} if options.on_host else find_gpu()
    deadline, results = time.monotonic() + options.minutes * 60, {}
    for part in (name for name in PARTS if name in options.parts.split(",")):
        flags = [flag for flag, on in (("--on-host", options.on_host), ("--stand-in", options.stand_in)) if on]
        results[part] = start_part(part, min(PARTS[part], deadline - time.monotonic()), flags)
        found = results[part]
        print(f"{part:12} {found['status']:8} {found['seconds']:6.1f} s  {found.get('why', '')}", flush=True)
    folder = options.out or ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    report = {"date": date.today().isoformat(), "commit": commit(), "gpu": gpu, "parts": results}
    (folder / "check.json").write_text(json.dumps(report, indent=1) + "\n")
    from gpu_report import page

    (folder / "check.html").write_text(page(report))
    print(folder / "check.json")
    if any(found["status"] == "failed" for found in results.values()):
        sys.exit(MISMATCH)


def find_gpu() -> dict[str, Any]:
    """The GPU by its name, capability, multiprocessors and bytes; leaves with code 3 where there is none."""
    try:
        import torch

        if torch.cuda.is_available():
            x = torch.cuda.get_device_properties(0)
            size = {"multiprocessors": x.multi_processor_count, "bytes": x.total_memory, "l2_bytes": getattr(x, "L2_cache_size", None)}
            return {"name": x.name, "capability": f"{x.major}{x.minor}", "torch": torch.__version__, **size}
        why = "PyTorch finds no GPU"
    except ImportError:
        why = "there is no PyTorch"
    print(f"kvexport: nothing was checked: {why}; --on-host tests this script without one", file=sys.stderr)
    sys.exit(3)


def start_part(part: str, limit: float, flags: list[str]) -> dict[str, Any]:
    """One part's outcome: passed, failed or skipped, its seconds, and its figures or why there are none."""
    started = time.monotonic()

    def outcome(status: str, **rest: Any) -> dict[str, Any]:
        return {"status": status, "seconds": round(time.monotonic() - started, 1), **rest}

    if limit < 5:
        return outcome("skipped", why="no time was left")
    command = [sys.executable, str(Path(__file__).resolve()), "--part", "sample" if part in SANITIZERS else part, *flags]
    if part in SANITIZERS:
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if "--on-host" in flags or tool is None:
            return outcome("skipped", why="it looks at a GPU's kernels alone" if "--on-host" in flags else "compute-sanitizer is not there")
        command = [tool, "--tool", part, "--error-exitcode", "9", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return outcome("failed", why=f"did not end within {limit:.0f} s", log=said[-2000:])
    last = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(FIGURES)), None)
    figures = json.loads(last[len(FIGURES) :]) if last else {}
    if done.returncode == 0 and "skipped" in figures:
        return outcome("skipped", why=figures["skipped"])
    if done.returncode or last is None:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason was given"]
        return outcome("failed", why=lines[-1][:200], log=(done.stdout + done.stderr)[-4000:], figures=figures)
    return outcome("passed", figures=figures)


def run_part(part: str, *, on_host: bool) -> None:
    """In a part's own process: its figures on one line after `FIGURES`."""
    import gpu_onnxruntime
    import gpu_parts
    import gpu_proof

    try:
        figures = {**gpu_proof.PARTS, **gpu_parts.PARTS, **gpu_onnxruntime.PARTS}[part](gpu_parts.Target(on_host=on_host))
    except gpu_parts.Skipped as lack:
        figures = {"skipped": str(lack)}
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    print(FIGURES + json.dumps(figures))


def stand_in_for_pydantic(*, always: bool = False) -> None:
    """Methods are pydantic models. Where there is no pydantic, their parameters' defaults and names are all that is needed here."""
    import importlib.util
    import types

    if not always and importlib.util.find_spec("pydantic"):
        return

    class BaseModel:
        def __init__(self, **parameters: Any) -> None:
            unknown = [name for name in parameters if not hasattr(type(self), name)]
            if unknown:
                raise TypeError(f"{type(self).__name__} has no parameter {unknown[0]}")
            self.__dict__.update(parameters)

    module = types.ModuleType("pydantic")
    module.BaseModel, module.ConfigDict = BaseModel, dict  # type: ignore[attr-defined]
    module.Field = lambda default=None, **_: default  # type: ignore[attr-defined]
    module.field_validator = module.model_validator = lambda *_, **__: lambda function: function  # type: ignore[attr-defined]
    sys.modules["pydantic"] = module


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
