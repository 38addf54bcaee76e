"""The CUDA kernels' sum over ranks, many times on the host, and whether planted bugs of it are found.

    python benchmarks/rank_sums.py [--sums 6000]

Ranks are threads of this process that arrive at random times. Bugs are planted in a copy of plugins/cuda/ranks, one at
a time. Each must show itself by other bits or by a rank that does not arrive; the unchanged kernel must not. This needs
g++ and about a minute. Writes benchmarks/results/rank-sums.json: the number of sums, and for every bug the fault that
revealed it.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import save

from plugins.building.targets import HOST_FLAGS
from plugins.building.tools import PLUGINS, host_compiler, run
from tests.support.cuda_ranks import Ranks, in_order, random_part

TYPES = ("float32", "float16", "uint16")  # uint16 holds bits of bfloat16
KERNEL, CALL = "all_reduce.h", "all_reduce.cu"
PATIENCE = 5_000_000_000  # nanoseconds; long enough for a busy machine
ALWAYS_TWO = (CALL, "kTwoShotsFrom = 2 << 20", "kTwoShotsFrom = -1")
FEW = 250  # sums for each bug


MEET = "if (!meet(block, args, turn, failed)) return;"


class Bug(NamedTuple):
    """A bug: in the given files each `old` becomes `new` everywhere."""

    name: str
    changes: Sequence[tuple[str, str, str]]


SOUND = Bug("always two shots", [ALWAYS_TWO])
BUGS = (
    Bug("halves do not take turns", [(KERNEL, "half[turn % 2]", "half[0]")]),
    Bug("nobody waits", [(KERNEL, "if (seen == said) return true;", "return true;")]),
    Bug("meetings are not counted from call to call", [(KERNEL, "own.turn[number] = turn;", "own.turn[number] = 0;")]),
    Bug(
        "parts in the other order",
        [(KERNEL, "args.mailbox(first + j).half", "args.mailbox(args.ranks.count - 1 - first - j).half")],
    ),
    Bug("the last number of a part is lost", [(KERNEL, "+ n < args.count; ++n) el", "+ n + 1 < args.count; ++n) el")]),
    Bug("sums are rounded as they grow", [(KERNEL, "total[n] + x[n];", "to_float(rounded_of<T>(total[n] + x[n]));")]),
    Bug("two shots: a rank's own share for all", [ALWAYS_TWO, (KERNEL, "args.mailbox(from)", "args.mailbox(rank)")]),
    Bug(
        "two shots: the second without a meeting",
        [ALWAYS_TWO, (KERNEL, f"++turn;\n      {MEET}\n      for", "++turn;\n      for")],
    ),
)  # fmt: skip
ROUNDED = """
template <class T>
KV_DEVICE T rounded_of(float x) {
  T y;
  assign(y, x);
  return y;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", type=int, default=6000)
    options = parser.parse_args()
    began, faults = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        sound = compiled(Bug("as it is", []), Path(folder))
        for count in (2, 3, 4):
            fault = given_away(sound, count, options.sums // 3, spread=True)
            assert not fault, f"the unchanged kernel: {fault}"
        for bug in (SOUND, *BUGS):
            library = compiled(bug, Path(folder))
            faults[bug.name] = given_away(library, 3, FEW)
            print(bug.name, "|", faults[bug.name], flush=True)
    assert not faults.pop(SOUND.name), "the unchanged kernel in two shots"
    missed = [name for name, fault in faults.items() if not fault]
    figures = {"sums": options.sums // 3 * 3, "ranks": [2, 3, 4], "wrong": 0, "bugs": faults, "not found": missed}
    save("rank-sums", {**figures, "seconds": round(time.monotonic() - began)})


def compiled(bug: Bug, folder: Path) -> Path:
    """Return a library of the sum alone, with the bug."""
    shutil.copytree(PLUGINS, folder / bug.name, ignore=shutil.ignore_patterns("tests", "cpu", "bindings"))
    ranks = folder / bug.name / "cuda" / "ranks"
    for name, old, new in bug.changes:
        text = (ranks / name).read_text()
        assert old in text, (bug.name, old)
        text = text.replace(old, new)
        (ranks / name).write_text(text.replace("struct Mailbox {", ROUNDED + "struct Mailbox {"))
    library = folder / f"{bug.name}.so".replace(" ", "-").replace(":", "")
    run([host_compiler(), *HOST_FLAGS, "-w", "-shared", "-x", "c++", str(ranks / CALL), "-o", str(library)], "compiler")
    return library


def given_away(library: Path, count: int, sums: int, *, spread: bool = False) -> str:
    """Return the fault of random sums, or "".

    Args:
        library: The library of the sum.
        count: The number of ranks.
        sums: The number of sums.
        spread: Whether ranks arrive at different times.
    """
    rng, ranks = np.random.default_rng(count), Ranks(ctypes.CDLL(str(library)), count, patience=PATIENCE)
    sizes = np.exp(rng.uniform(0, np.log(12_000), sums)).astype(int)  # numbers that 4 multiprocessors add at a time
    parts = [[random_part(rng, size, TYPES[i % 3]) for i, size in enumerate(sizes)] for _ in range(count)]
    if spread:
        ranks.pause = lambda rank: time.sleep(0.001) if rng.random() < 0.05 else None
    sums_of: list[Any] = ranks.run(parts)
    ranks.pool.shutdown()
    if ranks.word[0]:
        return f"no sum: {int(ranks.word[0]):#x}"
    for i, of_all in enumerate(zip(*parts, strict=True)):
        expected = in_order(of_all).tobytes()
        for rank, own in enumerate(sums_of):
            if own[i].tobytes() != expected:
                return f"other bits on rank {rank} in sum {i}, of {of_all[0].size} numbers"
    return ""


if __name__ == "__main__":
    main()
