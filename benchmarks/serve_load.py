"""A server among clients that do not behave: what the others notice of it.

    python -m benchmarks.serve_load ARTIFACT [--seconds 60] [--disconnects 200] [--stalled 50] [--out FILE]

Streams of one prompt by a few clients are timed alone and beside readers that take nothing, in turn; then clients go
away at random moments; then ten times as many ask as there are lanes and places in the queue. To be run on a quiet
machine: the ratio of the first part is one of times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from kvexport.engine.engine import load
from tests.support.http_server import Running, running
from tests.support.streams import RawClient

PATH = "/v1/completions"


def rate(server: Running, clients: int, tokens: int) -> float:
    """Tokens per second of streams that are read, all of them together."""
    body = {"prompt": "a b c", "max_tokens": tokens, "stream": True, "ignore_eos": True, "priority": -1}
    start = time.perf_counter()
    threads = [threading.Thread(target=server.ask, args=(PATH, body)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * tokens / (time.perf_counter() - start)


def stalled(server: Running, count: int, tokens: int, rounds: int) -> dict[str, float]:
    """The rate beside readers that take nothing, against the rate alone, in turn. Those whose requests have been
    given up hold no lane any more, but a connection and what waits for them."""
    ratios = []
    for _ in range(rounds):
        alone = rate(server, 2, tokens)
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "n": 4, "ignore_eos": True}
        readers = [RawClient(server.url, PATH, body, receive_buffer=1024) for _ in range(count)]
        for reader in readers:
            reader.read_until(b"data:")  # it has begun
        while server.service.worker.pending:
            time.sleep(0.01)
        ratios.append(rate(server, 2, tokens) / alone)
        for reader in readers:
            reader.close()
    return {"readers": count, "rate_beside_them": round(statistics.median(ratios), 3)}


def disconnects(server: Running, count: int) -> dict[str, int]:
    """Clients that go away at random moments."""
    choose = random.Random(0)
    for _ in range(count):
        body = {"prompt": "a " * choose.choice((1, 100)), "max_tokens": 400, "stream": choose.random() < 0.7}
        client = RawClient(server.url, PATH, body)
        if body["stream"] and choose.random() < 0.7:
            client.read_until(b"data:")
        client.close()
    while server.service.worker.pending:
        time.sleep(0.002)
    left = server.on_engine(lambda: len(server.service.engine.running()))
    return {"count": count, "lanes_left": left}


def overload(server: Running, seconds: float) -> dict[str, Any]:
    """Ten times as many clients as there is room for: what they are told, how long those wait that are answered, and
    the memory."""
    room = server.service.worker.room
    seen, waits, end = Counter[int](), list[float](), time.monotonic() + seconds
    process = psutil.Process()

    def ask() -> None:
        while time.monotonic() < end:
            start = time.monotonic()
            status = server.ask(PATH, {"prompt": "a b c", "max_tokens": 8})[0]
            seen[status] += 1
            if status == 200:
                waits.append(time.monotonic() - start)
            else:
                time.sleep(0.05)

    threads = [threading.Thread(target=ask) for _ in range(10 * room)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 4)
    before = process.memory_info().rss
    for thread in threads:
        thread.join()
    waits.sort()
    return {
        "clients": 10 * room,
        "seconds": seconds,
        "statuses": {str(k): v for k, v in sorted(seen.items())},
        "wait_p50": round(waits[len(waits) // 2], 3),
        "wait_p99": round(waits[int(len(waits) * 0.99)], 3),
        "memory_growth": round(process.memory_info().rss / before, 3),
        "left": server.service.worker.pending,
    }


def main() -> None:
    """All of it, in one server's life each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--disconnects", type=int, default=200)
    parser.add_argument("--stalled", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    engine = load(given.artifact)
    with running(engine, send_buffer=4096, buffer=64, stall=300.0) as server:
        result: dict[str, Any] = {"stalled": stalled(server, given.stalled, 200, given.rounds)}
    with running(engine) as server:
        result["disconnects"] = disconnects(server, given.disconnects)
    with running(engine, queue=2) as server:
        result["overload"] = overload(server, given.seconds)
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
