"""Test and time of sums over several GPUs: the part `ranks` of `gpu_check`.

There is a process for each GPU. The part compares the bits of the sums, and measures the microseconds of one sum within
a CUDA graph of 64.

    python -m tools.gpu_check.ranks RANK RANKS MEMORY [on-host]     one rank; MEMORY: the number of an open file
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from mmap import mmap
from typing import Any

import numpy as np

from kvexport.backends.onnxruntime import devices, mailboxes
from tests.conformance.cuda_library import DEVICE, HOST, load
from tests.support.cuda_ranks import View, in_order, mailbox_bytes, random_part, sum_of
from tools.gpu_check.target import Figures, Row, Skipped, Target

TYPES = ("float32", "float16", "uint16")  # uint16 holds bits of bfloat16
SIZES = (1, 7, 4096, 4099, 131_072, 2_097_152)  # numbers; 4096 are a token of Llama-3-8B
TIMED = {"a token": 4096, "32 tokens": 131_072, "a chunk of 512 tokens": 2_097_152}
SUMS = 64  # the sums of a step of 32 layers
MOST = 8
PATIENCE = 10_000_000_000  # nanoseconds
SECONDS = 150.0


def ranks(target: Target) -> Figures:
    """Return the rows of two GPUs, and of all if there are more than two."""
    count = 2 if target.on_host else _gpus()
    counts = sorted({2, min(count, MOST)})
    return target.rows(counts, {}, lambda n: rows_of(n, on_host=target.on_host))


def _gpus() -> int:
    count = devices.gpu_count()
    if count < 2:
        raise Skipped("it takes two GPUs")
    if missing := devices.rank_problems(min(count, MOST)):
        raise Skipped(missing[0][0])
    return count


def rows_of(count: int, *, on_host: bool) -> list[Row]:
    """Return the rows of `count` ranks, each in a process of its own; raise the error of a rank that fails."""
    file = os.memfd_create("ranks")
    os.ftruncate(file, mailboxes.shared_bytes(count))
    started = []
    for rank in range(count):
        command = [sys.executable, "-m", "tools.gpu_check.ranks", str(rank), str(count), str(file)]
        own = {} if on_host else {devices.VISIBLE: devices.visible_from(rank)}
        started.append(
            subprocess.Popen(
                [*command, *(["on-host"] if on_host else [])],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=(file,),
                env={**os.environ, **own},
            )
        )
    os.close(file)
    outputs = [process.communicate(timeout=SECONDS) for process in started]
    for rank, (process, (_, errors)) in enumerate(zip(started, outputs, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank}: {(errors.strip().splitlines() or ['no reason given'])[-1]}")
    rows: list[Row] = json.loads(outputs[0][0].splitlines()[-1])
    return [{"ranks": count, **row} for row in rows]


def main() -> None:
    """Run one rank and print its rows on the last line."""
    rank, count, file = (int(text) for text in sys.argv[1:4])
    target = Target(on_host="on-host" in sys.argv)
    if target.on_host:
        from tests.support import fake_gpus

        fake_gpus.install(setattr, fake_gpus.Driver(count))
    memory, library = mmap(file, 0), load(HOST if target.on_host else DEVICE)
    caller = target.caller  # on a GPU its memory is PyTorch's, in the context that opens the mailboxes
    problem, boxes = mailboxes.exchanged(memory, rank, count, mailbox_bytes(library), [])
    view = View(rank, count, PATIENCE, problem)
    view.mailbox[:count] = boxes
    calls = Sums(caller, view)
    rows = [measured(target, calls, name, size) for name, size in timed(target).items()]
    hold(calls, SIZES[:4] if target.on_host else SIZES, rounds=3 if target.on_host else 50)
    word = int.from_bytes(memory[:4], "little")
    if word:
        raise RuntimeError(f"a sum ended with {word:#x}")
    print(json.dumps(rows))


def timed(target: Target) -> dict[str, int]:
    """Return the number of elements of the measured cases, by name."""
    return dict(list(TIMED.items())[: target.scaled(3, 1)])


class Sums:
    """The calls of a rank over memory of its device."""

    def __init__(self, caller: Any, view: View) -> None:
        self.memory, self.view, self._sum = caller.memory, view, sum_of(caller.library)

    def enqueue(self, dtype: str, part: Any, total: Any, count: int) -> None:
        """Enqueue a sum.

        Raises:
            RuntimeError: The library refuses it; the message has the reason.
        """
        at = self.memory.address
        problem = self._sum(self.view, dtype, at(part), at(total), count, self.memory.stream)
        if problem:
            raise RuntimeError(problem)


def hold(calls: Sums, sizes: tuple[int, ...], rounds: int) -> None:
    """Check the bits of every sum; each rank also draws the numbers of the other ranks."""
    view, memory = calls.view, calls.memory
    for i in range(rounds):
        for dtype in TYPES:
            for size in sizes:
                rng = np.random.default_rng((i, size))
                parts = [random_part(rng, size, dtype) for _ in range(view.count)]
                part, total = memory.put(parts[view.rank]), memory.put(np.full_like(parts[0], 77))
                calls.enqueue(dtype, part, total, size)
                if memory.get(total).tobytes() != in_order(parts).tobytes():
                    raise RuntimeError(f"round {i}: another sum of {size} numbers in {dtype} than in the ranks' order")


def measured(target: Target, calls: Sums, name: str, size: int) -> Row:
    """Return the microseconds of a sum of float16, over SUMS sums in one CUDA graph."""
    part, total = (calls.memory.put(np.zeros(size, np.float16)) for _ in range(2))

    def step() -> None:
        for _ in range(SUMS):
            calls.enqueue("float16", part, total, size)

    seconds = statistics.median(target.spans(target.captured(step), lambda: None, 30))
    return {"sum of": name, "bytes": 2 * size, "us": seconds / SUMS * 1e6}


PARTS = {"ranks": ranks}

if __name__ == "__main__":
    main()
