"""Speed of two checkouts of kvexport on the CPU, in turn: whether a change made decode, prefill or export slower.

    python benchmarks/speed/versions.py --before CHECKOUT [--rounds 5] [--only NAME] [--work DIR]

The other side is the checkout of this script. Both need their native operators built (make native). Each side builds
the artifacts of M (benchmarks/common.py) with its own code and runs in processes of its own, in turn: blocks of 32
tokens of a running stream, whole prompts, whole builds. A ratio is the median over the pairs of seconds(after) /
seconds(before): 1.03 is 3 % slower. The bandwidth is measured before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.common import ROOT, WORK, make_checkpoint, options_of, read_bandwidth, save

BLOCK = 32  # tokens: one merge interval
THREADS = 2


@dataclass(frozen=True)
class Case:
    """A task of both sides.

    `kind` is decode (a block of steps at a context), prefill (a prompt of `context` tokens) or export (a build of the
    1.1B shape in float16).
    """

    kind: str
    method: str
    context: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        if self.kind == "export":
            return f"export, {self.method}"
        return f"{self.kind}: {self.method} at {self.context}" + (f", batch {self.batch}" if self.batch > 1 else "")


CASES = [
    Case("decode", "full", 512),
    Case("decode", "full", 4096),
    Case("decode", "keepkv", 4096),
    Case("decode", "keepkv", 4096, batch=8),
    Case("decode", "ballot", 4096),
    Case("decode", "h2o", 4096),
    Case("prefill", "keepkv", 16384),
    Case("prefill", "full", 2048, batch=4),
    Case("export", "copy"),
]


class Side:
    """The process of a checkout for one case, which runs one block or prompt at a time."""

    def __init__(self, checkout: Path, artifact: Path, case: Case) -> None:
        command = [sys.executable, __file__, "--side", str(artifact), "--case", json.dumps(vars(case))]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(THREADS)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )
        self.ask()  # a warm-up

    def ask(self) -> float:
        """Return the seconds of the next block or prompt."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def answer(artifact: str, case: Case) -> None:
    """Run blocks or prompts in a side's own process, one for each line of input; print the seconds of each."""
    import kvexport

    engine = kvexport.load(artifact, verify=False)
    ids = np.random.default_rng(0).integers(3, 4096, case.context).tolist()
    settings: dict[str, Any] = {"do_sample": False, "eos_token_ids": ()}
    stream = None
    for _ in sys.stdin:
        if case.kind == "prefill":
            start = time.perf_counter()
            engine.generate([ids] * case.batch, max_new_tokens=1, **settings)
            print(time.perf_counter() - start, flush=True)
            continue
        if stream is None:
            stream = engine.stream([ids] * case.batch, max_new_tokens=1 << 20, **settings)
            for _ in range(case.batch):
                next(stream)
        start = time.perf_counter()
        for _ in range(BLOCK * case.batch):
            next(stream)
        print(time.perf_counter() - start, flush=True)


def build(checkout: Path, recipe: Path, out: Path) -> float:
    shutil.rmtree(out, ignore_errors=True)
    os.sync()  # so that a build does not wait for the writes of the one before
    command = [sys.executable, "-m", "kvexport", "build", "--recipe", str(recipe), "--out", str(out)]
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout, env=environment)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr[-2000:]}")
    return time.perf_counter() - start


def recipe_of(case: Case, work: Path) -> Path:
    if case.kind == "export":
        content: dict[str, Any] = {
            "model": {"path": str(make_checkpoint("1b", work / "1b", "float16")), "dtype": "float16"},
            "cache": {"method": "keepkv", "budget": 512},
            "export": {"weights": case.method},
        }
    else:
        budget = 1024 if case.kind == "prefill" else 512
        content = {
            "model": {"path": str(make_checkpoint("M", work / "M"))},
            "cache": {"method": case.method, "budget": budget, "merge_every": BLOCK},
            "export": {"prefill_chunk": 512 if case.kind == "prefill" else 128},
            "limits": {"max_length": case.context + 2048 if case.method == "full" else 131072, "max_batch": case.batch},
            "backend": {"threads": THREADS},
        }
    path = work / (case.name.replace(": ", "-").replace(", ", "-").replace(" ", "-") + ".yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def compare(case: Case, sides: dict[str, Path], work: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of both sides in turn, and their ratio."""
    recipe = recipe_of(case, work)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    if case.kind == "export":
        for _ in range(rounds):
            for name, checkout in sides.items():
                seconds[name].append(build(checkout, recipe, work / "out" / name))
    else:
        for name, checkout in sides.items():
            build(checkout, recipe, work / "out" / name)
        running = {name: Side(checkout, work / "out" / name, case) for name, checkout in sides.items()}
        for _ in range(6 * rounds if case.kind == "decode" else rounds):
            for name, side in running.items():
                seconds[name].append(side.ask())
        for side in running.values():
            side.close()
    ratios = [a / b for a, b in zip(seconds["after"], seconds["before"], strict=True)]
    return {
        **{name: statistics.median(values) for name, values in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": [round(r, 4) for r in ratios],
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--after", type=Path, default=ROOT, help="a checkout in place of this script's")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        answer(options.side, Case(**json.loads(options.case)))
        return
    if not options.before:
        parser.error("--before CHECKOUT is needed")
    work = (options.work or WORK).absolute()
    (work / "out").mkdir(parents=True, exist_ok=True)
    sides = {"before": options.before.resolve(), "after": options.after.resolve()}
    rows: dict[str, Any] = {"read_GBps_before": read_bandwidth() / 1e9}
    for case in CASES:
        if options.only in case.name:
            rows[case.name] = compare(case, sides, work, options.rounds)
            print(f"{case.name:32} {rows[case.name]['ratio']:.3f}", flush=True)
    rows["read_GBps_after"] = read_bandwidth() / 1e9
    if not options.only:
        print(save("versions", rows))


if __name__ == "__main__":
    main()
