"""Cost of a fit to reference queries, and of measured budgets of KV heads, on SmolLM2.

    python benchmarks/fitted.py [--rounds 7] [--threads 2] [--work DIR] [--heads]

A merge of 32 entries with a fit is compared with keepkv's, a step with h2o's, and a step of `ballot` in measured
budgets of KV heads with one in uniform budgets. Caches have 512 slots and merge in all layers every 32 steps, after a
prompt of 1,024 tokens. Every side runs in a process of its own, in turn, round by round. The bandwidth is measured
before and after. A ratio is the median over rounds. A step is the mean of 128, merges included; a merge is the median
of the four. With --heads only the two sides of `ballot` are measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import interleave, ratio, read_bandwidth, save

SIDES = ("h2o", "keepkv", "ballot", "ballot+heads", "grkv", "attention_matching")
HEADS = "smollm2-135m-heads"  # the recipe with the budgets of KV heads for sides with +heads
FITS = ("grkv", "attention_matching")
STEPS, PROMPT = 128, 1024
GOALS = {"merge, times keepkv's": 2.0, "speed of a step, of h2o's": 0.93}


def artifact(work: Path, method: str, threads: int) -> Path:
    """Return the artifact of a side; it is built if it is missing."""
    from kvexport.export.build import build
    from kvexport.recipe.load import load_recipe

    path = work / f"{method}-{threads}"
    if not path.exists():
        settings = [f"cache.method={method.removesuffix('+heads')}", f"backend.threads={threads}", "limits.max_batch=1"]
        if method.endswith("+heads"):
            shares = load_recipe(HEADS).recipe.cache.allocation.shares
            settings += ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"]
        build(load_recipe("smollm2-135m-base", settings).recipe, path)
    return path


def measure(path: Path) -> dict[str, float]:
    """Return the seconds of a step and of a merge."""
    import kvexport

    lanes = kvexport.load(path, verify=False).lanes(1)
    state: Any = lanes.state
    merge, seconds = state.merge, []

    def timed(first: int, last: int) -> None:
        start = time.perf_counter()
        merge(first, last)
        seconds.append(time.perf_counter() - start)

    state.merge = timed
    ids = np.random.default_rng(0).integers(3, 40000, PROMPT)
    lanes.prefill([ids])
    for i in range(32):
        lanes.append([ids[i : i + 1]])
    seconds.clear()
    start = time.perf_counter()
    for i in range(STEPS):
        lanes.append([ids[i : i + 1]])
    return {"step": (time.perf_counter() - start) / STEPS, "merge": statistics.median(seconds)}


def in_process(path: Path, threads: int, measurements: list[dict[str, float]]) -> float:
    """Run one side in a fresh process and return its seconds per step."""
    command = [sys.executable, __file__, "--side", str(path), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measurements.append(json.loads(done.stdout.splitlines()[-1]))
    return measurements[-1]["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--heads", action="store_true", help="compare only budgets of KV heads with uniform budgets")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side)))
        return
    work = options.work or Path(tempfile.gettempdir()) / "kvexport-fitted"
    work.mkdir(parents=True, exist_ok=True)
    sides = [side for side in SIDES if not options.heads or side.startswith("ballot")]
    measurements: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    paths = {side: artifact(work, side, options.threads) for side in sides}
    before = read_bandwidth(threads=options.threads)
    interleave({s: partial(in_process, paths[s], options.threads, measurements[s]) for s in sides}, options.rounds)
    after = read_bandwidth(threads=options.threads)
    times = {side: {what: [x[what] for x in rows] for what in ("step", "merge")} for side, rows in measurements.items()}
    results: dict[str, Any] = {
        "threads": options.threads,
        "bandwidth_GBps": [before / 1e9, after / 1e9],
        "milliseconds": {
            side: {what: [round(1e3 * x, 3) for x in values] for what, values in both.items()}
            for side, both in times.items()
        },
        "time of a step and of a merge in budgets of heads, times ballot's": {
            what: ratio(times["ballot+heads"][what], times["ballot"][what]) for what in ("step", "merge")
        },
    }
    if not options.heads:
        results |= {
            "goals": GOALS,
            "merge, times keepkv's": {s: ratio(times[s]["merge"], times["keepkv"]["merge"]) for s in FITS},
            "speed of a step, of h2o's": {s: ratio(times["h2o"]["step"], times[s]["step"]) for s in FITS},
        }
    print(json.dumps(results, indent=1))
    if options.rounds > 1:
        print(save("fitted-heads" if options.heads else "fitted", results))


if __name__ == "__main__":
    main()
