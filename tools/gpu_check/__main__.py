"""Build, test and measure the CUDA kernels on this machine's GPU: ``make gpu-check``.

    python -m tools.gpu_check [--parts first|second|conformance,decode] [--minutes 10] [--on-host]

The command needs nvcc, and a Python with PyTorch and numpy; nothing is fetched. A part that needs more is skipped if
that is missing, and its row names it. Every part runs in its own process with a time limit. If one fails, the others
continue. check.json is written after every part, and check.jsonl after every row, to $OUT or benchmarks/results/<gpu>.
The exit code is 4 if a part failed, and 3 if a part did not run. ``--on-host`` runs the same parts over the kernels
compiled for the host, to test this command: its figures have no meaning.
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

# The most seconds of each part on a GPU. The build comes first, since the others use its library. Correctness comes
# next, because a wrong kernel's speed means nothing: of the kernels alone, then of whole engines. The figures follow,
# the most valuable first. These parts add up to MINUTES. The others take a second run.
MINUTES = 10.0
PARTS = {
    "build": 150,
    "conformance": 70,
    "repeat": 20,
    "launches": 20,
    "onnxruntime": 120,
    "bandwidth": 15,
    "decode": 80,
    "model": 55,
    "prefill": 20,
    "merge": 30,
}
FURTHER_PARTS = {
    "memcheck": 60,
    "racecheck": 90,
    "synccheck": 60,
    "tensorrt": 240,
}
EVERY_PART = PARTS | FURTHER_PARTS
MODULES = ("parts", "proof", "model", "onnxruntime", "tensorrt", "launches")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
NOT_RUN, MISMATCH = 3, 4
FIGURES = "figures: "


def main() -> None:
    """Run the parts that the command line names, each in a process of its own, and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = f"the parts to run: first ({', '.join(PARTS)}), second ({', '.join(FURTHER_PARTS)}), or their names"
    parser.add_argument("--parts", default="first", help=which)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the time after which no part is started")
    parser.add_argument("--on-host", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="the folder of the results in place of $OUT or benchmarks/results/<gpu>"
    )
    parser.add_argument(
        "--prebuild", nargs="+", metavar="90", help="only compile for these capabilities, for a later run"
    )
    parser.add_argument("--stand-in", action="store_true", help="run without pydantic even if it is installed")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        stand_in_for_pydantic(always=options.stand_in)
        run_part(options)
        return
    if options.prebuild:
        from tools.gpu_check import prebuilt

        print(*prebuilt.write(options.prebuild), sep="\n")
        return
    options.parts = {"first": ",".join(PARTS), "second": ",".join(FURTHER_PARTS)}.get(options.parts, options.parts)
    unknown = set(options.parts.split(",")) - set(EVERY_PART)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(EVERY_PART)}")
    sys.exit(check(options))


def check(options: argparse.Namespace) -> int:
    """Run the parts, write the report after each, and return the exit code."""
    gpu = {"name": "host"} if options.on_host else find_gpu()
    folder = folder_of(options.out, gpu["name"])
    rows = folder / "check.jsonl"
    rows.unlink(missing_ok=True)
    flags = [f"--{name.replace('_', '-')}" for name in ("on_host", "stand_in", "small") if getattr(options, name)]
    flags += ["--out", str(rows)]
    deadline, results = time.monotonic() + options.minutes * 60, dict[str, Any]()
    stand_in_for_pydantic(always=options.stand_in)
    for part in EVERY_PART:
        if part not in options.parts.split(","):
            continue
        left = deadline - time.monotonic()
        results[part] = start_part(part, left if options.on_host else min(EVERY_PART[part], left), flags)
        result = results[part]
        print(f"{part:12} {result['status']:8} {result['seconds']:6.1f} s  {result.get('why', '')}", flush=True)
        compared = goals(results)
        report = {"date": date.today().isoformat(), **sources(), "gpu": gpu, "goals": compared, "parts": results}
        new = folder / "check.json.new"
        new.write_text(json.dumps(report, indent=1) + "\n")
        new.replace(folder / "check.json")
    for row in compared:
        verdict, figure = {True: "met", False: "NOT MET", None: ""}[row["met"]], row["measured"]
        number = "not measured" if figure is None else format(figure, ".4g")
        print(f"{verdict:8} {number:>12}  {row['figure']} {row['goal']}".rstrip())
    print(folder / "check.json")
    if any(result["status"] == "failed" for result in results.values()):
        return MISMATCH
    left_out = [part for part, result in results.items() if result["status"] == "skipped"]
    if left_out:
        print(f"not checked: {', '.join(left_out)} (the reasons are above)")
    return NOT_RUN if left_out else 0


def folder_of(named: Path | None, gpu: str) -> Path:
    """Return the folder of the results: the named one, $OUT if it is set, or the folder of this GPU."""
    own = ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder = named or (Path(os.environ["OUT"]) if os.environ.get("OUT") else own)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_gpu() -> dict[str, Any]:
    """Return the GPU's name, capability, multiprocessors and bytes; exit with code 3 if there is none."""
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
    """Run one part in a process of its own.

    Returns:
        Its status (passed, failed or skipped), its seconds, and its figures or the reason why there are none.
    """
    started = time.monotonic()

    def outcome(status: str, **rest: Any) -> dict[str, Any]:
        return {"status": status, "seconds": round(time.monotonic() - started, 1), **rest}

    if limit < 5:
        return outcome("skipped", why="no time was left")
    own = ["--part", "sample" if part in SANITIZERS else part, "--seconds", str(limit - 3)]
    command = [sys.executable, "-m", "tools.gpu_check", *own, *flags]
    if part in SANITIZERS:
        wrapped = under_tool(part, command, on_host="--on-host" in flags)
        if isinstance(wrapped, str):
            return outcome("skipped", why=wrapped)
        command = wrapped
    # The process gets a session of its own, so that processes which compute-sanitizer or a compiler started end with it
    # and do not disturb the next part.
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
    return outcome("passed", figures=figures)


def under_tool(part: str, command: list[str], *, on_host: bool) -> list[str] | str:
    """Return the command under compute-sanitizer, or the reason why that is impossible."""
    if on_host:
        return "it needs kernels on a GPU"
    name = "compute-sanitizer"
    tool = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if tool is None:
        return f"{name} was not found"
    # memcheck only checks the kernels' accesses: PyTorch makes calls that CUDA may refuse.
    quiet = ["--report-api-errors", "no"] if part == "memcheck" else []
    return [tool, "--tool", part, "--error-exitcode", "9", *quiet, *command]


def run_part(options: argparse.Namespace) -> None:
    """Measure one part in its own process.

    The figures up to the last row are printed after `FIGURES`, after every row. The same lines are appended to the file
    of rows, which remains if the parent process ends.
    """
    until = time.monotonic() + options.seconds
    if options.on_host:
        os.environ["OMP_NUM_THREADS"] = "1"  # sizes for the host are too small for more threads
    from tools.gpu_check.target import Skipped, Target

    # Imported one after another: not every part needs PyTorch, whose import takes seconds.
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
    except Skipped as reason:
        figures = {"skipped": str(reason)}
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    keep(figures)


def stand_in_for_pydantic(*, always: bool = False) -> None:
    """Replace pydantic, if it is missing, by a module with the few features that methods need here.

    Methods are pydantic models; here only the names and defaults of their parameters matter.
    """
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
    module.__spec__ = importlib.machinery.ModuleSpec("pydantic", None)  # for code that checks whether it is installed
    module.BaseModel, module.ConfigDict = BaseModel, dict  # type: ignore[attr-defined]
    module.Field = lambda default=None, **_: default  # type: ignore[attr-defined]
    module.field_validator = module.model_validator = lambda *_, **__: lambda function: function  # type: ignore[attr-defined]
    sys.modules["pydantic"] = module


def sources() -> dict[str, str]:
    from tools.gpu_check import prebuilt

    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    except OSError:
        done = ""
    return {"commit": done or "unknown", "kernels": prebuilt.digest()}


if __name__ == "__main__":
    main()
