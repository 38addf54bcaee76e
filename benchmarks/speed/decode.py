"""Decode speed of M on the CPU, beside transformers (sdpa, DynamicCache) and of methods beside each other.

    python benchmarks/speed/decode.py [--rounds 5] [--only NAME] [--work DIR]

Every side of a pair runs in a process of its own, in turn, round by round, since two thread pools in one process would
disturb each other. A figure is the mean time of one step over a whole number of merge intervals, every token counted. A
ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import WORK, interleave, make_checkpoint, options_of, ratio, read_bandwidth, save

THREADS = 2
STEPS = 128
# name of an engine: (method, budget, chunk of a prompt, parameters); `full` has the capacity of its sequence
ENGINES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "full": ("full", 1, 512, {}),
    "keepkv": ("keepkv", 512, 128, {}),
    "keepkv-evict": ("keepkv", 512, 128, {"order": "evict-first"}),
    "ballot": ("ballot", 512, 128, {}),
    "h2o": ("h2o", 512, 128, {}),
    "streaming": ("streaming", 512, 128, {}),
}
# name of a pair: (side a, side b, context, goal of speed(a) / speed(b))
PAIRS = {
    "full_vs_transformers_4096": ("full", "transformers", 4096, 2.5),
    "keepkv_vs_transformers_16384": ("keepkv", "transformers", 16384, 10.0),
    "keepkv_vs_h2o_4096": ("keepkv", "h2o", 4096, 0.9),
    "keepkv_vs_keepkv_evict_first_4096": ("keepkv", "keepkv-evict", 4096, None),
}


def engine_path(work: Path, side: str, context: int, batch: int = 1) -> Path:
    """Return the artifact of a side; it is built if it is missing."""
    from kvexport.export.build import build
    from kvexport.recipe.fields import Recipe

    method, budget, chunk, parameters = ENGINES[side]
    path = work / f"{side}{f'-{context}' if method == 'full' else ''}{f'-x{batch}' if batch > 1 else ''}"
    if not path.exists():
        recipe = Recipe.model_validate(
            {
                "model": {"path": str(make_checkpoint("M", work / "M"))},
                "cache": {"method": method, "budget": budget, "merge_every": 32, "parameters": parameters},
                "export": {"prefill_chunk": chunk},
                "limits": {"max_length": context + 2 * STEPS if method == "full" else 131072, "max_batch": batch},
                "backend": {"threads": THREADS},
            }
        )
        build(recipe, path)
    return path


def time_kvexport(path: Path, context: int) -> float:
    """Return the seconds per step of kvexport."""
    import kvexport

    lanes = kvexport.load(path, verify=False).lanes(1)
    ids = np.random.default_rng(0).integers(3, 4096, context)
    lanes.prefill([ids])
    return _steps(lambda i: lanes.append([ids[i : i + 1]]))


def time_transformers(checkpoint: Path, context: int) -> float:
    """Return the seconds per step of the Hugging Face model with sdpa and a DynamicCache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvexport.export.hooks.attention import cache_name

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), attn_implementation="sdpa").eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 4096, context))[None]
    cache: Any = {cache_name(model): DynamicCache()}
    with torch.no_grad():
        for start in range(0, context, 1024):
            model(ids[:, start : start + 1024], **cache, logits_to_keep=1)
        return _steps(lambda i: model(ids[:, i : i + 1], **cache))


def _steps(step: Any) -> float:
    for i in range(32):
        step(i)
    start = time.perf_counter()
    for i in range(STEPS):
        step(i)
    return (time.perf_counter() - start) / STEPS


def in_process(side: str, context: int, work: Path) -> float:
    """Run one side in a fresh process and return its seconds per step."""
    command = [sys.executable, __file__, "--side", side, "--context", str(context), "--work", str(work)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(done.stdout.splitlines()[-1]))


def long_context(work: Path) -> dict[str, Any]:
    """Compare the step time at a context of 65536 with that at 2048, in blocks of 32 steps in turn."""
    import kvexport
    from kvexport.engine.lanes import Lanes

    engine = kvexport.load(engine_path(work, "keepkv", 0), verify=False)
    limits = engine.manifest.limits
    ids = np.random.default_rng(0).integers(3, 4096, 65536)
    both = {}
    for context in (2048, 65536):
        lanes = Lanes(
            engine.new_state(1), engine.plan, 1, prefill_chunk=limits.prefill_chunk, merge_every=limits.merge_every
        )
        lanes.prefill([ids[:context]])
        both[context] = lanes

    def block(lanes: Lanes) -> float:
        start = time.perf_counter()
        for i in range(32):
            lanes.append([ids[i : i + 1]])
        return (time.perf_counter() - start) / 32

    figures = interleave({str(c): partial(block, lanes) for c, lanes in both.items()}, 24)
    state = sum(a.nbytes for a in both[2048].state.state.values()) + both[2048].state.past_length.nbytes  # type: ignore[attr-defined]
    return {
        "milliseconds": {c: 1e3 * statistics.median(v) for c, v in figures.items()},
        "ratio_65536_to_2048": ratio(figures["65536"], figures["2048"]),
        "cache_bytes_allocated": state,
        "cache_bytes_planned": engine.plan.bytes(1),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[*PAIRS, "long_context"])
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    if options.side:
        if options.side == "transformers":
            print(time_transformers(work / "M", options.context))
        else:
            print(time_kvexport(engine_path(work, options.side, options.context), options.context))
        return
    results: dict[str, Any] = {"bandwidth_before_GBps": read_bandwidth() / 1e9}
    for name, (a, b, context, goal) in PAIRS.items():
        if options.only not in (None, name):
            continue
        for side in (a, b):
            if side != "transformers":
                engine_path(work, side, context)
        times = interleave({s: partial(in_process, s, context, work) for s in (a, b)}, options.rounds)
        results[name] = {
            "milliseconds": {s: [round(1e3 * t, 3) for t in v] for s, v in times.items()},
            "tokens_per_second": {s: 1 / statistics.median(v) for s, v in times.items()},
            "ratio": ratio(times[b], times[a]),
            "goal": goal,
        }
        print(name, json.dumps(results[name]), flush=True)
    if options.only in (None, "long_context"):
        results["long_context"] = long_context(work)
        print("long_context", json.dumps(results["long_context"]), flush=True)
    results["bandwidth_after_GBps"] = read_bandwidth() / 1e9
    if options.only is None:
        print(save("decode", results))


if __name__ == "__main__":
    main()
