"""Speed and memory of kvexport beside onnxruntime-genai on the CPU, with the reference model M.

    python benchmarks/genai.py --genai DIR [--rounds 5] [--only NAME] [--work DIR]

DIR is the target of `pip install --no-deps --target DIR onnxruntime-genai==0.18.0`. Both sides use the same ONNX
Runtime, threads and checkpoint. Every side runs in a process of its own. Decoding goes in turn, block by block. A block
is one merge interval, and its merge is counted. Prompts go in turn, one by one. A ratio is the median over all blocks.
The bandwidth is measured before and after every round. `read_GBps` is the bytes that a step must read over its time. If
both sides read at the machine's full speed, the ratio of speeds is that of bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import SHAPES, interleave, make_checkpoint, ratio, read_bandwidth, save
from decode import ENGINES, STEPS, THREADS, engine_path

BLOCK = 32  # tokens: one merge interval
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


def genai_model(work: Path, genai: str) -> Path:
    """Return M as onnxruntime-genai's builder makes it, with as many threads as the other side."""
    folder = work / "M-genai"
    if not folder.exists():
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-m",
            str(make_checkpoint("M", work / "M")),
        ]
        environment = {**os.environ, "PYTHONPATH": genai}
        subprocess.run(
            [*command, "-o", str(folder), "-p", "fp32", "-e", "cpu", "-c", str(work / "cache")],
            env=environment,
            check=True,
        )
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = THREADS
    path.write_text(json.dumps(config, indent=1))
    return folder


def generator(work: Path, ids: np.ndarray, room: int) -> Any:
    """Return a genai generator for prompts of the shape of `ids` [batch, tokens]."""
    import onnxruntime_genai as og

    model = og.Model(str(work / "M-genai"))
    parameters = og.GeneratorParams(model)
    length = ids.shape[1] + room
    parameters.set_search_options(max_length=length, min_length=length, batch_size=len(ids))
    return og.Generator(model, parameters)


def stepper(side: str, context: int, batch: int, work: Path) -> Callable[[], float]:
    """Return a function that decodes BLOCK tokens of each of `batch` sequences and returns the seconds of a step.

    The sequences begin with `context` tokens.
    """
    if side == "genai":
        ids = np.random.default_rng(0).integers(3, 4096, (1, context)).astype(np.int32).repeat(batch, 0)
        sequence = generator(work, ids, 2 * STEPS)
        sequence.append_tokens(ids)
        step = sequence.generate_next_token
    else:
        import kvexport

        lanes = kvexport.load(engine_path(work, side, context, batch), verify=False).lanes(batch)
        prompt = np.random.default_rng(0).integers(3, 4096, context)
        lanes.prefill([prompt] * batch)
        step = partial(lanes.append, [prompt[:1]] * batch)

    def block() -> float:
        start = time.perf_counter()
        for _ in range(BLOCK):
            step()
        seconds = (time.perf_counter() - start) / BLOCK
        time.sleep(0.2)  # threads that still spin would slow down the other side
        return seconds

    return block


def serve_blocks(side: str, context: int, batch: int, work: Path) -> None:
    """Print one line with a block's figure for every line of input, in a process of its own.

    The first block warms up.
    """
    block = stepper(side, context, batch, work)
    block()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(block(), flush=True)


def interleaved(pair: Pair, work: Path, genai: str) -> dict[str, list[float]]:
    """Return seconds per step of both sides, block by block in turn.

    Both processes exist at once, and one of them computes at a time. Other tenants of the machine vary within seconds,
    so they affect both sides alike.
    """
    workers = {
        side: start_process(["blocks", side, pair.context, pair.batch], work, genai) for side in (pair.a, pair.b)
    }
    figures: dict[str, list[float]] = {side: [] for side in workers}

    def answer(side: str) -> str:
        line = workers[side].stdout.readline()
        if not line:
            raise SystemExit(f"{side} failed:\n{workers[side].stderr.read()[-2000:]}")
        return str(line)

    for side in workers:
        answer(side)
    for _ in range(BLOCKS):
        for side, worker in workers.items():
            worker.stdin.write("\n")
            worker.stdin.flush()
            figures[side].append(float(answer(side)))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return figures


def prefill_seconds(side: str, context: int, work: Path) -> float:
    """Return the seconds of a prompt, after a shorter one has warmed up the process."""
    ids = np.random.default_rng(0).integers(3, 4096, (1, context)).astype(np.int32)
    if side == "genai":
        generator(work, ids[:, :1024], 8).append_tokens(ids[:, :1024])
        sequence = generator(work, ids, 8)
        start = time.perf_counter()
        sequence.append_tokens(ids)
        return time.perf_counter() - start
    import kvexport

    engine = kvexport.load(engine_path(work, side, context), verify=False)
    engine.lanes(1).prefill([ids[0, :1024].astype(np.int64)])
    lanes = engine.lanes(1)
    start = time.perf_counter()
    lanes.prefill([ids[0].astype(np.int64)])
    return time.perf_counter() - start


def peak_megabytes(side: str, context: int, work: Path) -> float:
    """Return the peak resident memory of a process that loads the engine and reads a prompt."""
    import kvexport

    kvexport.load(engine_path(work, side, context), verify=False).lanes(1).prefill([np.arange(context) % 4000 + 3])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start_process(what: list[Any], work: Path, genai: str) -> subprocess.Popen[str]:
    """Start this script in a fresh process, for one side."""
    command = [sys.executable, __file__, "--side", json.dumps(what), "--work", str(work), "--genai", genai]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": genai if what[1] == "genai" else ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def in_process(what: str, side: str, context: int, work: Path, genai: str) -> float:
    """Return one measurement of a fresh process."""
    process = start_process([what, side, context, 1], work, genai)
    out, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{side} failed:\n{errors[-2000:]}")
    return float(out.splitlines()[-1])


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
    bandwidth = [read_bandwidth(256, THREADS, 0.2)]
    for _ in range(rounds):
        if pair.kind == "decode":
            times = interleaved(pair, work, genai)
        else:
            times = interleave(
                {side: partial(in_process, pair.kind, side, pair.context, work, genai) for side in sides}, 1
            )
        for side in sides:
            figures[side] += times[side]
        bandwidth.append(read_bandwidth(256, THREADS, 0.2))
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
    run = partial(in_process, "prefill", "keepkv-1024", work=work, genai=genai)
    figures = interleave({str(n): partial(run, context=n) for n in (8192, 65536)}, rounds)
    return {
        "tokens_per_second": {n: [round(int(n) / t, 1) for t in v] for n, v in figures.items()},
        "ratio": ratio([t / 8192 for t in figures["8192"]], [t / 65536 for t in figures["65536"]]),
        "goal": 0.95,
    }


def memory(work: Path, genai: str) -> dict[str, Any]:
    """Measure the peak memory of a long prompt over that of a short one."""
    peaks = {n: in_process("memory", "keepkv", n, work, genai) for n in (2048, 65536)}
    return {"peak_megabytes": peaks, "ratio": peaks[65536] / peaks[2048], "goal": "at most 1.05"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--genai", required=True)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of fresh processes; a round has seven blocks of either side"
    )
    parser.add_argument("--only", help="a part of a measurement's name")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.work or Path(tempfile.gettempdir()) / "kvexport-benchmark"
    work.mkdir(parents=True, exist_ok=True)
    if options.side:
        what, side, context, batch = json.loads(options.side)
        if what == "blocks":
            serve_blocks(side, context, batch, work)
        else:
            print({"prefill": prefill_seconds, "memory": peak_megabytes}[what](side, context, work))
        return
    genai_model(work, options.genai)
    pairs = [p for p in PAIRS if options.only is None or options.only in p.name]
    results: dict[str, Any] = {pair.name: compare(pair, options.rounds, work, options.genai) for pair in pairs}
    linear, peak = "prefill: 65536 / 8192 tokens, keepkv-1024", "peak memory: prompt of 65536 / 2048 tokens, keepkv"
    if options.only is None or options.only in linear:
        results[linear] = linearity(options.rounds, work, options.genai)
    if options.only is None or options.only in peak:
        results[peak] = memory(work, options.genai)
    if options.only is None:
        print(save("genai", results))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
