"""Builds, proves and measures the CUDA kernels on the GPU that is there: ``make gpu-check``.

    python -m tools.gpu_check [--parts conformance,decode] [--minutes 7.5] [--on-host]

Takes nvcc, and a Python with PyTorch and numpy; nothing is fetched. A part that takes more is skipped, and says so,
where that is missing. Every part runs in a process of its own with a limit on its time, and one that fails is reported
while the others go on. Writes benchmarks/results/<gpu>/check.json and check.html; exit code 4 where a part failed.
``--on-host`` runs the same parts over the kernels
compiled for the host, to test this script: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from tools.gpu_check.goals import goals

ROOT = Path(__file__).resolve().parents[2]

# Seconds at the most, on a GPU. The build comes first: the others take its library.
PARTS = {
    "build": 150,
    "conformance": 90,
    "repeat": 60,
    "memcheck": 90,
    "racecheck": 90,
    "synccheck": 90,
    "bandwidth": 30,
    "decode": 90,
    "prefill": 45,
    "merge": 45,
    "model": 130,
    "transformers": 120,
    "onnxruntime": 120,
}
SANITIZERS = ("memcheck", "racecheck", "synccheck")
# They measure no time, so they run side by side; every other part has the GPU to itself.
PROOFS = ("conformance", "repeat", *SANITIZERS)
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
        if options.part != "transformers":  # it asks what is installed, and takes no methods
            stand_in_for_pydantic(always=options.stand_in)
        run_part(options.part, on_host=options.on_host)
        return
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    gpu = {"name": "host"} if options.on_host else find_gpu()
    flags = [flag for flag, on in (("--on-host", options.on_host), ("--stand-in", options.stand_in)) if on]
    results = start_parts(
        [name for name in PARTS if name in options.parts.split(",")], time.monotonic() + options.minutes * 60, flags
    )
    folder = options.out or ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    asked = goals(results)
    for row in asked:
        said, found = {True: "met", False: "NOT MET", None: ""}[row["met"]], row["found"]
        figure = "not measured" if found is None else format(found, ".4g")
        print(f"{said:8} {figure:>12}  {row['figure']} {row['goal']}".rstrip())
    report = {"date": date.today().isoformat(), "commit": commit(), "gpu": gpu, "goals": asked, "parts": results}
    (folder / "check.json").write_text(json.dumps(report, indent=1) + "\n")
    stand_in_for_pydantic(always=options.stand_in)
    from tools.gpu_check.report import page

    (folder / "check.html").write_text(page(report))
    print(folder / "check.json")
    if any(found["status"] == "failed" for found in results.values()):
        sys.exit(MISMATCH)


def start_parts(wanted: list[str], deadline: float, flags: list[str]) -> dict[str, Any]:
    """Every part's outcome, in the order of `wanted`."""
    proofs = [part for part in wanted if part in PROOFS]
    turns = [[part] for part in wanted if part not in PROOFS]
    turns.insert(1 if wanted[0] == "build" else 0, proofs)
    results: dict[str, Any] = {}

    def started(part: str) -> dict[str, Any]:
        left = deadline - time.monotonic()
        return start_part(part, left if "--on-host" in flags else min(PARTS[part], left), flags)

    for turn in turns:
        with ThreadPoolExecutor(len(PROOFS)) as pool:
            for part, found in zip(turn, pool.map(started, turn), strict=True):
                results[part] = found
                print(f"{part:12} {found['status']:8} {found['seconds']:6.1f} s  {found.get('why', '')}", flush=True)
    return results


def find_gpu() -> dict[str, Any]:
    """The GPU by its name, capability, multiprocessors and bytes; leaves with code 3 where there is none."""
    try:
        import torch

        if torch.cuda.is_available():
            x = torch.cuda.get_device_properties(0)
            size = {
                "multiprocessors": x.multi_processor_count,
                "bytes": x.total_memory,
                "l2_bytes": getattr(x, "L2_cache_size", None),
            }
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
    command = [sys.executable, "-m", "tools.gpu_check", "--part", "sample" if part in SANITIZERS else part, *flags]
    if part in SANITIZERS:
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if "--on-host" in flags or tool is None:
            return outcome(
                "skipped",
                why="it looks at a GPU's kernels alone" if "--on-host" in flags else "compute-sanitizer is not there",
            )
        # Of memcheck the kernels' accesses alone: PyTorch asks CUDA what it may refuse.
        quiet = ["--report-api-errors", "no"] if part == "memcheck" else []
        command = [tool, "--tool", part, "--error-exitcode", "9", *quiet, *command]
    # In a session of its own: what compute-sanitizer or a compiler started goes with it, and measures beside nothing.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return outcome("failed", why=f"did not end within {limit:.0f} s", log=(output + errors)[-4000:])
    last = next((line for line in reversed(output.splitlines()) if line.startswith(FIGURES)), None)
    figures = json.loads(last[len(FIGURES) :]) if last else {}
    if process.returncode == 0 and "skipped" in figures:
        return outcome("skipped", why=figures["skipped"])
    if process.returncode or last is None:
        lines = (errors or output).strip().splitlines() or [
            f"it ended with code {process.returncode} and gave no reason"
        ]
        return outcome("failed", why=lines[-1][:200], log=(output + errors)[-4000:], figures=figures)
    return outcome("passed", figures=figures)


def run_part(part: str, *, on_host: bool) -> None:
    """In a part's own process: its figures on one line after `FIGURES`."""
    from tools.gpu_check import model, onnxruntime, parts, proof, transformers

    modules = (proof, parts, model, transformers, onnxruntime)
    if on_host:
        import torch

        torch.set_num_threads(1)  # what is small enough for the host is too small for more
    known: dict[str, Any] = {name: function for module in modules for name, function in module.PARTS.items()}
    try:
        figures = known[part](parts.Target(on_host=on_host))
    except parts.Skipped as lack:
        figures = {"skipped": str(lack)}
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    print(FIGURES + json.dumps(figures))


def stand_in_for_pydantic(*, always: bool = False) -> None:
    """Methods are pydantic models. Where there is no pydantic, their parameters' defaults and names are all that is
    needed here."""
    import importlib.machinery
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
    module.__spec__ = importlib.machinery.ModuleSpec("pydantic", None)  # for whoever asks whether it is there
    module.BaseModel, module.ConfigDict = BaseModel, dict  # type: ignore[attr-defined]
    module.Field = lambda default=None, **_: default  # type: ignore[attr-defined]
    module.field_validator = module.model_validator = lambda *_, **__: lambda function: function  # type: ignore[attr-defined]
    sys.modules["pydantic"] = module


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
