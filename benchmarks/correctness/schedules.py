"""Random schedules of requests over two engines of a tiny model, whose answers must equal those of solo runs.

    python benchmarks/correctness/schedules.py [--schedules 1000] [--steps 60]

Requests join, leave, are cancelled, saved, restored and forked, have next turns and deadlines. No lane may
leak, and memory must stay flat. Memory is the process's resident set after every tenth of the schedules; in the first
tenth it still grows once.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.common import save
from kvexport.engine.load import load
from tests.support.schedules import Alone, Schedule
from tests.support.tiny_model import make_artifact


def resident() -> int:
    """Return the bytes of memory that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Run the schedules and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    happened: Counter[str] = Counter()
    memory = []
    with tempfile.TemporaryDirectory() as folder:
        artifact = make_artifact(Path(folder))
        *engines, other = (load(artifact, threads=1, lanes=lanes) for lanes in (None, 2, None))
        for seed in range(arguments.schedules):
            # The answers of solo runs are not kept from one schedule to the next: only they would grow.
            sessions = Path(folder) / "sessions"
            happened += Schedule(engines, Alone(other), sessions, seed).run(arguments.steps)
            shutil.rmtree(sessions)
            if (seed + 1) % max(arguments.schedules // 10, 1) == 0:
                memory.append(resident())
                print(seed + 1, dict(happened), memory[-1] >> 20, "MiB", flush=True)
    growth = memory[-1] / memory[min(1, len(memory) - 1)] - 1
    figures = {"schedules": arguments.schedules, "steps": arguments.steps, "happened": dict(happened)}
    print(save("schedules", {**figures, "resident_bytes": memory, "growth_after_a_fifth": growth}))


if __name__ == "__main__":
    main()
