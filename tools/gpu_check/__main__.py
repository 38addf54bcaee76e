"""Builds, proves and measures the CUDA kernels on the GPU that is there: ``make gpu-check``.

    python -m tools.gpu_check [--parts conformance,decode] [--minutes 7.5] [--on-host]

Takes nvcc, and a Python with PyTorch and numpy; nothing is fetched. A part that takes more is skipped, and says so,
where that is missing. Every part runs in a process of its own with a limit on its time, and one that fails is reported
while the others go on. Writes check.json and check.html after every part, and check.jsonl at every row, into $OUT or
benchmarks/results/<gpu>; exit code 4 where a part failed. ``--on-host`` runs the same parts over the kernels compiled
for the host, to test this script: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

from tools.gpu_check.goals import goals

ROOT = Path(__file__).resolve().parents[2]

# Seconds at the most, on a GPU, in the order of what they are worth, one after another. The build comes first: the
# others take its library.
PARTS = {
    "build": 150,
    "repeat": 45,
    "bandwidth": 30,
    "decode": 100,
    "merge": 60,
    "model": 170,
    "linear": 60,
    "launches": 45,
    "prefill": 45,
    "conformance": 90,
    "ranks": 90,
    "ncu": 60,
    "memcheck": 60,
    "racecheck": 90,
    "synccheck": 60,
    "transformers": 120,
    "onnxruntime": 120,
}
MODULES = ("parts", "proof", "model", "ranks", "transformers", "onnxruntime", "launches", "linear")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
MISMATCH = 4
FIGURES = "figures: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=7.5, help="after which no part is started")
    parser.add_argument("--on-host", action="store_true")
    parser.add_argument("--out", type=Path, help="instead of $OUT, or of benchmarks/results/<gpu>")
    parser.add_argument("--prebuild", nargs="+", metavar="90", help="compile for these capabilities, for a later run")
    parser.add_argument("--stand-in", action="store_true", help="do without pydantic even where it is")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        if options.part != "transformers":  # it asks what is installed, and takes no methods
            stand_in_for_pydantic(always=options.stand_in)
        run_part(options)
        return
    if options.prebuild:
        from tools.gpu_check import prebuilt

        print(*prebuilt.write(options.prebuild), sep="\n")
        return
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    sys.exit(check(options))


def check(options: argparse.Namespace) -> int:
    """Runs the parts and writes what is known after each; the exit code."""
    gpu = {"name": "host"} if options.on_host else find_gpu()
    folder = folder_of(options.out, gpu["name"])
    rows = folder / "check.jsonl"
    rows.unlink(missing_ok=True)
    flags = [f"--{name.replace('_', '-')}" for name in ("on_host", "stand_in", "small") if getattr(options, name)]
    flags += ["--out", str(rows)]
    deadline, results = time.monotonic() + options.minutes * 60, dict[str, Any]()
    stand_in_for_pydantic(always=options.stand_in)
    for part in PARTS:
        if part not in options.parts.split(","):
            continue
        left = deadline - time.monotonic()
        results[part] = start_part(part, left if options.on_host else min(PARTS[part], left), flags)
        found = results[part]
        print(f"{part:12} {found['status']:8} {found['seconds']:6.1f} s  {found.get('why', '')}", flush=True)
        asked = goals(results)
        report = {"date": date.today().isoformat(), **sources(), "gpu": gpu, "goals": asked, "parts": results}
        write_report(folder, report)
    for row in asked:
        said, figure = {True: "met", False: "NOT MET", None: ""}[row["met"]], row["found"]
        number = "not measured" if figure is None else format(figure, ".4g")
        print(f"{said:8} {number:>12}  {row['figure']} {row['goal']}".rstrip())
    print(folder / "check.json")
    return MISMATCH if any(found["status"] == "failed" for found in results.values()) else 0


def folder_of(asked: Path | None, gpu: str) -> Path:
    """Where results go: what is named, $OUT where that is set, or the folder of this GPU."""
    own = ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder = asked or (Path(os.environ["OUT"]) if os.environ.get("OUT") else own)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """As check.json, then as a page."""
    made = folder / "check.json.new"
    made.write_text(json.dumps(report, indent=1) + "\n")
    made.replace(folder / "check.json")
    from tools.gpu_check.report import page

    (folder / "check.html").write_text(page(report))


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
    own = ["--part", "sample" if part in (*SANITIZERS, "ncu") else part, "--seconds", str(limit - 3)]
    command = [sys.executable, "-m", "tools.gpu_check", *own, *flags]
    if part in (*SANITIZERS, "ncu"):
        wrapped = under_tool(part, command, on_host="--on-host" in flags)
        if isinstance(wrapped, str):
            return outcome("skipped", why=wrapped)
        command = wrapped
    # In a session of its own: what compute-sanitizer or a compiler started goes with it, and measures beside nothing.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT
    )
    late = False
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        late = True
    last = next((line for line in reversed(output.splitlines()) if line.startswith(FIGURES)), None)
    figures = json.loads(last[len(FIGURES) :]) if last else {}
    log = (output + errors)[-4000:]
    if late:
        return outcome("failed", why=f"did not end within {limit:.0f} s", log=log, figures=figures)
    if process.returncode == 0 and "skipped" in figures:
        return outcome("skipped", why=figures["skipped"])
    if process.returncode or last is None:
        lines = (errors or output).strip().splitlines() or [
            f"it ended with code {process.returncode} and gave no reason"
        ]
        return outcome("failed", why=lines[-1][:200], log=log, figures=figures)
    if part == "ncu":
        figures["report"] = [line for line in output.splitlines() if not line.startswith(FIGURES)][-400:]
    return outcome("passed", figures=figures)


def under_tool(part: str, command: list[str], *, on_host: bool) -> list[str] | str:
    """The command under compute-sanitizer or Nsight Compute, or why there is none."""
    name = "ncu" if part == "ncu" else "compute-sanitizer"
    if on_host:
        return "it looks at a GPU's kernels alone"
    tool = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if tool is None:
        return f"{name} is not there"
    if part == "ncu":  # the kernels of a step and of a merge that take the most, once each
        kernels = ["--kernel-name-base", "demangled", "--kernel-name", "regex:Decode|Nearest", "--launch-count", "4"]
        return [tool, "--set", "basic", *kernels, *command]
    # Of memcheck the kernels' accesses alone: PyTorch asks CUDA what it may refuse.
    quiet = ["--report-api-errors", "no"] if part == "memcheck" else []
    return [tool, "--tool", part, "--error-exitcode", "9", *quiet, *command]


def run_part(options: argparse.Namespace) -> None:
    """In a part's own process: its figures on a line after `FIGURES`, as far as they are after every row; the same
    lines go to the file of rows, which outlives the process that reads them."""
    until = time.monotonic() + options.seconds
    if options.on_host:
        os.environ["OMP_NUM_THREADS"] = "1"  # what is small enough for the host is too small for more
    from tools.gpu_check.target import Skipped, Target

    # One after another: not every part takes PyTorch, which is seconds to import.
    known: Any = (importlib.import_module(f"tools.gpu_check.{name}").PARTS for name in MODULES)
    measure = next(there[options.part] for there in known if options.part in there)

    def keep(figures: Any) -> None:
        print(FIGURES + json.dumps(figures), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps({"part": options.part, "figures": figures}) + "\n")

    target = Target(on_host=options.on_host, small=options.small, keep=keep, until=until)
    try:
        figures = measure(target)
    except Skipped as lack:
        figures = {"skipped": str(lack)}
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    keep(figures)


def stand_in_for_pydantic(*, always: bool = False) -> None:
    """Methods are pydantic models. Where there is no pydantic, their parameters' defaults and names are all that is
    needed here."""
    import importlib.machinery
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


def sources() -> dict[str, str]:
    """What was checked: the commit, where git knows it, and the digest of the kernels' sources."""
    from tools.gpu_check import prebuilt

    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    except OSError:
        done = ""
    return {"commit": done or "unknown", "kernels": prebuilt.digest()}


if __name__ == "__main__":
    main()
