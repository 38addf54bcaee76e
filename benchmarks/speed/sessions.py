"""Cost of sessions, forks, prompt snapshots and lanes: the model M with KeepKV in 512 slots, on the CPU.

    python benchmarks/speed/sessions.py [--rounds 9] [--only NAME] [--work DIR]

Both sides of a figure run in turn, round by round, in one process with one engine. A ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvexport
from benchmarks.common import interleave, ratio, save
from benchmarks.speed.decode import engine_path
from kvexport.engine.engine import Engine
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import Request
from kvexport.state.snapshot import Snapshot

LANES, VOCABULARY = 8, 4096
RANDOM = np.random.default_rng(0)


def ids(count: int) -> list[int]:
    drawn: list[int] = RANDOM.integers(3, VOCABULARY, count).tolist()
    return drawn


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def first_token(engine: Engine, request: Request) -> float:
    """Return the seconds from adding a request to its first token; then run the request to its end."""
    start = time.perf_counter()
    engine.add(request)
    while not request.tokens:
        engine.step()
    elapsed = time.perf_counter() - start
    while engine.busy:
        engine.step()
    return elapsed


def greedy(engine: Engine, tokens: int) -> Any:
    return engine.settings(max_new_tokens=tokens, do_sample=False, ignore_eos=True)


def save_and_restore(engine: Engine, rounds: int) -> dict[str, Any]:
    """Measure saving a lane to bytes and restoring it, beside a copy and a SHA-256 of as many bytes each way."""
    request = Request(ids(2000), greedy(engine, 2), keep=True)
    first_token(engine, request)
    lanes, snapshot = engine._pool.lanes, request.snapshot
    assert snapshot is not None
    data = np.frombuffer(snapshot.to_bytes(), np.uint8)
    target = np.empty_like(data)

    def kept() -> None:
        taken = lanes.save(0)
        blob = Snapshot(snapshot.origin, snapshot.ids, taken.state, taken.counters).to_bytes()
        lanes.restore(0, Snapshot.from_bytes(blob, engine.manifest).saved)

    def copied() -> None:
        for _ in range(2):
            np.copyto(target, data)
            hashlib.sha256(target.data).digest()

    figures = interleave({"kept": partial(seconds, kept), "copied": partial(seconds, copied)}, rounds)
    return {"bytes": data.nbytes, "kept_over_copied": ratio(figures["kept"], figures["copied"]), **figures}


def fork(engine: Engine, rounds: int) -> dict[str, Any]:
    """Measure the copy of one lane to another, beside a decode step of one lane."""
    lanes = engine.lanes(2)
    lanes.prefill([np.array(ids(2000)), np.array(ids(1))])

    def steps() -> float:
        return seconds(lambda: [lanes.append([[7]], first=0) for _ in range(32)]) / 32

    figures = interleave({"fork": lambda: seconds(lambda: lanes.copy(0, 1)), "step": steps}, rounds)
    return {"fork_over_step": ratio(figures["fork"], figures["step"]), **figures}


def hit(engine: Engine, rounds: int) -> dict[str, Any]:
    """Measure the first token of a prompt of 4,116 tokens, without and with a snapshot of its first 4,096 tokens."""

    def cold() -> float:
        engine.prefixes = None
        return first_token(engine, Request(ids(4096 + 20), greedy(engine, 1)))

    def warm() -> float:
        engine.prefixes = Prefixes(engine.manifest.limits.prefill_chunk, 1 << 30)
        shared = ids(4096)
        first_token(engine, Request([*shared, *ids(20)], greedy(engine, 1)))
        request = Request([*shared, *ids(20)], greedy(engine, 1))
        seconds = first_token(engine, request)
        assert request.cached_tokens == 4096
        engine.prefixes = None
        return seconds

    seconds = interleave({"hit": warm, "cold": cold}, rounds)
    return {"hit_over_cold": ratio(seconds["hit"], seconds["cold"]), **seconds}


def turns(engine: Engine, rounds: int) -> dict[str, Any]:
    """Measure the first token of turn 50 of a conversation beside that of turn 2.

    A turn has 40 new tokens and an answer of 40, after a first message of 1,000 tokens. So the cache is full and every
    turn merges.
    """
    figures: dict[str, list[float]] = {"turn_50": [], "turn_2": []}
    for _ in range(rounds):
        start: Snapshot | None = None
        times = []
        for turn in range(50):
            request = Request(ids(40 if turn else 1000), greedy(engine, 40), start=start, keep=True)
            times.append(first_token(engine, request))
            start = request.snapshot
        # Medians over neighbouring turns, because one turn alone varies much.
        figures["turn_50"].append(statistics.median(times[-5:]))
        figures["turn_2"].append(statistics.median(times[1:6]))
    return {"turn_50_over_turn_2": ratio(figures["turn_50"], figures["turn_2"]), **figures}


def scheduling(engine: Engine, rounds: int) -> dict[str, Any]:
    """Measure the shares of a decode step of eight lanes that the scheduler, and all but the ONNX graphs, take.

    The second share includes sampling and text.
    """
    model: Any = engine.model
    spent = {"scheduler": 0.0, "graphs": 0.0}

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            figures = function(*arguments)
            spent[kind] += time.perf_counter() - start
            return figures

        return call

    places = [(engine._scheduler, name, "scheduler") for name in ("next", "update", "expired")]
    places.append((model, "run", "graphs"))
    for place, name, kind in places:
        setattr(place, name, timed(kind, getattr(place, name)))
    shares: dict[str, list[float]] = {"scheduler": [], "outside_of_graphs": []}
    for _ in range(rounds):
        fill(engine, LANES, 64)
        spent.update(scheduler=0.0, graphs=0.0)
        whole = seconds(lambda: [engine.step() for _ in range(32)])
        shares["scheduler"].append(spent["scheduler"] / whole)
        shares["outside_of_graphs"].append(1 - spent["graphs"] / whole)
        drain(engine)
    for place, name, _ in places:
        delattr(place, name)
    return {f"median_{name}_share_of_step": statistics.median(values) for name, values in shares.items()} | shares


def fill(engine: Engine, lanes: int, tokens: int) -> list[Request]:
    """Start `lanes` requests and return them when all of them decode."""
    requests = [Request(ids(600), greedy(engine, tokens)) for _ in range(lanes)]
    for request in requests:
        engine.add(request)
    while not all(request.tokens for request in requests):
        engine.step()
    return requests


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def throughput(engine: Engine, rounds: int) -> dict[str, Any]:
    """Measure the tokens per second of eight decoding lanes beside those of one."""

    def speed(lanes: int) -> float:
        requests = fill(engine, lanes, 200)
        before = sum(len(request.tokens) for request in requests)
        took = seconds(lambda: [engine.step() for _ in range(64)])
        generated = sum(len(request.tokens) for request in requests) - before
        for request in requests:
            engine.cancel(request.id)
        return generated / took

    figures = interleave({"eight": partial(speed, LANES), "one": partial(speed, 1)}, rounds)
    return {"eight_over_one": ratio(figures["eight"], figures["one"]), **figures}


def short_beside_long(engine: Engine, rounds: int) -> dict[str, Any]:
    """Count the steps before the first token of a short prompt that joins while prompts of 16,384 tokens are read."""
    figures: dict[str, list[float]] = {"calls_before": [], "seconds": [], "chunk_seconds": []}
    for _ in range(rounds):
        long = [Request(ids(16384), greedy(engine, 1)) for _ in range(3)]
        for request in long:
            engine.add(request)
        step = [seconds(engine.step) for _ in range(6)]
        short, steps = Request(ids(20), greedy(engine, 1)), 0
        engine.add(short)
        start = time.perf_counter()
        while not short.tokens:
            engine.step()
            steps += 1
        figures["calls_before"].append(steps - 1)
        figures["seconds"].append(time.perf_counter() - start)
        figures["chunk_seconds"].append(statistics.median(step))
        for request in long:
            engine.cancel(request.id)
    return {"median_calls_before": statistics.median(figures["calls_before"]), **figures}


FIGURES = {f.__name__: f for f in (save_and_restore, fork, hit, turns, scheduling, throughput, short_beside_long)}


def main() -> None:
    """Measure all figures and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=[*FIGURES])
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = engine_path(arguments.work or Path(folder), "keepkv", 4096, LANES)
        engine = kvexport.load(path, verify=False)
        engine.add(Request(ids(4), greedy(engine, 2)))
        fill(engine, LANES - 1, 2)
        drain(engine)
        figures = {}
        for name, measure in FIGURES.items():
            if arguments.only in (None, name):
                measured = measure(engine, arguments.rounds)
                figures[name] = {
                    key: value[1:] if isinstance(value, list) else value for key, value in measured.items()
                }
                print(
                    name,
                    {key: value for key, value in figures[name].items() if not isinstance(value, list)},
                    flush=True,
                )
    if arguments.only is None:
        print(save("sessions", {"rounds": arguments.rounds, **figures}))


if __name__ == "__main__":
    main()
