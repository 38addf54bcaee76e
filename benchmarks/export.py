"""Memory and time of exporting a checkpoint, by kvexport and by the model builder of onnxruntime-genai.

    python benchmarks/export.py [--shapes 1b 7b] [--rounds N] [--work DIR] [--genai DIR_ON_PYTHONPATH]

Each export runs in a process of its own, in turn. Seconds are the median of the rounds. Peak memory is the largest: the
kernel's figure for the finished process (maximum resident set, mapped files included). Ratios are medians of the
rounds' ratios. The builder is measured if `onnxruntime_genai` can be imported. For 7b neither the builder, which holds
the whole checkpoint, nor copied weights are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, SHAPES, ratio, save

GENAI = "onnxruntime-genai"


def measured(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command and return its wall seconds and its peak resident megabytes.

    A shell runs in between, since a child starts with the peak of its parent.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@"', "sh", *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()[-2000:]}")
    return {"seconds": time.perf_counter() - start, "peak_megabytes": usage.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1b", "7b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path)
    parser.add_argument(
        "--genai", default="", help="a folder with onnxruntime_genai, on the PYTHONPATH of its builder alone"
    )
    options = parser.parse_args()
    work = options.work or Path(tempfile.gettempdir()) / "kvexport-benchmark"
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for shape in options.shapes:
        # In a process of its own, so that this process stays small.
        make = "import sys, pathlib, common; common.make_checkpoint(sys.argv[1], pathlib.Path(sys.argv[2]), 'float16')"
        subprocess.run(
            [sys.executable, "-c", make, shape, str(work.absolute() / shape)], check=True, cwd=Path(__file__).parent
        )
        sides = commands(shape, work, options.genai)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, (command, environment) in sides.items():
                rounds[name].append(measured(command, environment))
                shutil.rmtree(work / "out")
        results[shape] = {
            name: {
                "seconds": median(r["seconds"] for r in runs),
                "peak_megabytes": max(r["peak_megabytes"] for r in runs),
                "rounds": runs,
            }
            for name, runs in rounds.items()
        }
        for name in sides.keys() - {GENAI} if GENAI in sides else ():
            for figure in ("seconds", "peak_megabytes"):
                results[shape][name][f"{figure}_ratio"] = ratio(
                    [r[figure] for r in rounds[name]], [r[figure] for r in rounds[GENAI]]
                )
        print(shape, json.dumps(results[shape], indent=1), flush=True)
    previous = (
        json.loads(RESULTS.joinpath("export.json").read_text()) if RESULTS.joinpath("export.json").exists() else {}
    )
    kept = {shape: rows for shape, rows in previous.items() if shape in SHAPES}
    print(save("export", {**kept, **results}))


def commands(shape: str, work: Path, genai: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the measured commands of a shape by name, each with its environment; they write into `work/out`."""
    sides: dict[str, tuple[list[str], dict[str, str]]] = {}
    recipe = work / f"{shape}.yaml"
    recipe.write_text(f"model: {{path: {work / shape}, dtype: float16}}\ncache: {{method: keepkv, budget: 512}}\n")
    build = [sys.executable, "-m", "kvexport", "build", "--recipe", str(recipe), "--out", str(work / "out")]
    sides["kvexport"] = build, dict(os.environ)
    if shape != "7b" and genai:
        builder = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-m",
            str(work / shape),
            "-o",
            str(work / "out"),
        ]
        sides[GENAI] = (
            [*builder, "-p", "fp16", "-e", "cuda", "-c", str(work / "cache")],
            {**os.environ, "PYTHONPATH": genai},
        )
    return sides


if __name__ == "__main__":
    main()
