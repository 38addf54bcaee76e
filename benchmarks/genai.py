"""Speed and memory of kvexport beside onnxruntime-genai on the CPU, with the reference model M.

    python benchmarks/genai.py --genai DIR [--rounds 5] [--only NAME] [--work DIR]

DIR is the target of `pip install --no-deps --target DIR onnxruntime-genai==0.18.0`. Both sides use the same ONNX
Runtime, threads and checkpoint. Every side runs in a process of its own, a new one for every round of decoding.
Decoding goes in turn, block by block. A block is one merge interval, and its merge is counted. Prompts go in turn, one
by one. A ratio is the median over all blocks. The bandwidth is measured before and after every round. `read_GBps` is
the bytes that a step must read over its time. If both sides read at the machine's full speed, the ratio of speeds is
that of bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import SHAPES, make_checkpoint, ratio, save
from decode import ENGINES, STEPS, THREADS, engine_path
from workers import BLOCK, Run, Worker, engine_run, genai_model, genai_run, in_turn, serve

BLOCKS = 2 * STEPS // BLOCK - 1  # blocks that fit into the engines' and genai's cache, less one to warm up


@dataclass(frozen=True)
class Pair:
    """Side a beside side b. `goal` is the wanted ratio of speeds a / b.

    `kind` is decode (a step of `batch` sequences at a context) or prefill (a prompt).
    """

    kind: str
    a: str
    b: str
    context: int
    goal: float
    batch: int = 1

    @property
    def name(self) -> str:
        """The name of the pair in the results."""
        return f"{self.kind}: {self.a} / {self.b} at {self.context}" + (
            f", batch {self.batch}" if self.batch > 1 else ""
        )


PAIRS = [
    Pair("decode", "full", "genai", 512, 1.05),
    Pair("decode", "full", "genai", 4096, 1.1),
    Pair("decode", "full", "genai", 16384, 1.15),
    Pair("decode", "keepkv", "genai", 4096, 2.0),
    Pair("decode", "keepkv", "genai", 16384, 4.5),
    Pair("decode", "keepkv", "genai", 4096, 2.0, batch=8),
    Pair("decode", "keepkv", "h2o", 4096, 0.97),
    Pair("decode", "ballot", "h2o", 4096, 0.97),
    Pair("prefill", "keepkv-1024", "genai", 16384, 3.0),
]


def runner(kind: str, side: str, context: int, batch: int, work: Path) -> Run:
    """Return a function that returns the seconds of a step of `batch` sequences, or of a prompt of `context` tokens."""
    ids = np.random.default_rng(0).integers(3, 4096, context)
    if side == "genai":
        return genai_run(kind, work / "M-genai", ids, context + 2 * STEPS, batch)
    return engine_run(kind, engine_path(work, side, context, batch), ids, batch)


def worker_of(kind: str, side: str, context: int, batch: int, work: Path, genai: str) -> Worker:
    """Return the process of one side."""
    arguments = ["--side", json.dumps([kind, side, context, batch]), "--work", str(work), "--genai", genai]
    return Worker(f"{side}-{context}", [__file__, *arguments], THREADS, work, genai if side == "genai" else None)


def peak_megabytes(context: int, work: Path) -> float:
    """Return the peak resident memory of a process that loads keepkv's engine and reads a prompt."""
    code = (
        "import kvexport, numpy, resource, sys; path, n = sys.argv[1], int(sys.argv[2]); "
        "kvexport.load(path, verify=False).lanes(1).prefill([numpy.arange(n) % 4000 + 3]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    command = [sys.executable, "-c", code, str(engine_path(work, "keepkv", context)), str(context)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def bytes_moved(side: str, context: int, batch: int) -> int:
    """Return the bytes that a step must read, in float32.

    These are every weight once, except the embedding, of which it reads rows, and every sequence's keys and values.
    """
    m = SHAPES["M"]
    hidden, size = m["hidden_size"], m["hidden_size"] // m["num_attention_heads"]
    cached = 2 * m["num_key_value_heads"] * size  # floats of a slot in one layer
    layer = hidden * (2 * hidden + cached) + 3 * hidden * m["intermediate_size"]
    held = context if side in ("genai", "full") else ENGINES[side][1] + BLOCK // 2  # slots, on the average
    return 4 * (m["num_hidden_layers"] * (layer + batch * held * cached) + hidden * m["vocab_size"])


def compare(pair: Pair, rounds: int, work: Path, genai: str) -> dict[str, Any]:
    """Measure both sides in turn."""
    sides = (pair.a, pair.b)
    for side in sides:
        if side != "genai":
            engine_path(work, side, pair.context, pair.batch)
    figures: dict[str, list[float]] = {side: [] for side in sides}
    bandwidth: list[float] = []
    # The caches have room for the blocks of one round.
    turns, blocks = (rounds, BLOCKS) if pair.kind == "decode" else (1, rounds)
    for _ in range(turns):
        workers = [worker_of(pair.kind, side, pair.context, pair.batch, work, genai) for side in sides]
        times, around = in_turn(workers, 1, THREADS, blocks)
        for side, seconds in zip(sides, times.values(), strict=True):
            figures[side] += seconds
        bandwidth += around
    tokens = pair.batch if pair.kind == "decode" else pair.context
    ratios = sorted(b / a for a, b in zip(figures[pair.a], figures[pair.b], strict=True))
    moved = {side: bytes_moved(side, pair.context, pair.batch) for side in sides} if pair.kind == "decode" else {}
    return {
        "tokens_per_second": {side: [round(tokens / t, 1) for t in figures[side]] for side in sides},
        "bandwidth_GBps": [round(x / 1e9, 1) for x in bandwidth],
        "read_GBps": {side: round(count / statistics.median(figures[side]) / 1e9, 1) for side, count in moved.items()},
        **({"ratio_of_bytes": moved[pair.b] / moved[pair.a]} if moved else {}),
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "goal": pair.goal,
    }


def linearity(rounds: int, work: Path, genai: str) -> dict[str, Any]:
    """Measure the prefill of 65536 tokens beside 8192: tokens per second must not fall."""
    counts = (8192, 65536)
    workers = [worker_of("prefill", "keepkv-1024", n, 1, work, genai) for n in counts]
    figures = dict(zip(counts, in_turn(workers, 1, THREADS, rounds)[0].values(), strict=True))
    return {
        "tokens_per_second": {str(n): [round(n / t, 1) for t in v] for n, v in figures.items()},
        "ratio": ratio([t / 8192 for t in figures[8192]], [t / 65536 for t in figures[65536]]),
        "goal": 0.95,
    }


def memory(work: Path) -> dict[str, Any]:
    """Measure the peak memory of a long prompt over that of a short one."""
    peaks = {n: peak_megabytes(n, work) for n in (2048, 65536)}
    return {"peak_megabytes": peaks, "ratio": peaks[65536] / peaks[2048], "goal": "at most 1.05"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--genai", required=True)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds; a round of decoding has seven blocks of either side"
    )
    parser.add_argument("--only", help="a part of a measurement's name")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.work or Path(tempfile.gettempdir()) / "kvexport-benchmark"
    work.mkdir(parents=True, exist_ok=True)
    if options.side:
        serve(runner(*json.loads(options.side), work))
        return
    genai_model(make_checkpoint("M", work / "M"), work / "M-genai", options.genai, THREADS, "fp32")
    pairs = [p for p in PAIRS if options.only is None or options.only in p.name]
    results: dict[str, Any] = {pair.name: compare(pair, options.rounds, work, options.genai) for pair in pairs}
    linear, peak = "prefill: 65536 / 8192 tokens, keepkv-1024", "peak memory: prompt of 65536 / 2048 tokens, keepkv"
    if options.only is None or options.only in linear:
        results[linear] = linearity(options.rounds, work, options.genai)
    if options.only is None or options.only in peak:
        results[peak] = memory(work)
    if options.only is None:
        print(save("genai", results))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
