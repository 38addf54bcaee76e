"""The CUDA kernels' sum over ranks on the host, many times, and would a wrong one be found? Ranks are threads of this
process that come when they like; bugs are planted in a copy of plugins/cuda/ranks, one at a time, and each has to give
itself away, by other bits or by a rank that does not come, where the kernel as it is does not.

    python benchmarks/rank_sums.py [--sums 6000]

Takes g++, about a minute. Writes benchmarks/results/rank-sums.json: the sums, and of every bug what gave it away.
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

TYPES = ("float32", "float16", "uint16")  # the last: bits of bfloat16
KERNEL, CALL = "all_reduce.h", "all_reduce.cu"
PATIENCE = 5_000_000_000  # nanoseconds, of machines that do other things as well
ALWAYS_TWO = (CALL, "kTwoShotsFrom = 2 << 20", "kTwoShotsFrom = -1")
FEW = 250  # sums of a bug


MEET = "if (!meet(block, args, turn, failed)) return;"


class Bug(NamedTuple):
    """Each `old` of a file becomes `new`, wherever it stands."""

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
    began, found = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        sound = compiled(Bug("as it is", []), Path(folder))
        for count in (2, 3, 4):
            said = given_away(sound, count, options.sums // 3, spread=True)
            assert not said, f"the kernel as it is: {said}"
        for bug in (SOUND, *BUGS):
            library = compiled(bug, Path(folder))
            found[bug.name] = given_away(library, 3, FEW)
            print(bug.name, "|", found[bug.name], flush=True)
    assert not found.pop(SOUND.name), "the kernel in two shots"
    missed = [name for name, said in found.items() if not said]
    figures = {"sums": options.sums // 3 * 3, "ranks": [2, 3, 4], "wrong": 0, "bugs": found, "not found": missed}
    save("rank-sums", {**figures, "seconds": round(time.monotonic() - began)})


def compiled(bug: Bug, folder: Path) -> Path:
    """A library of the sum alone, with the bug."""
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
    """What is wrong with random sums; "" where nothing is. spread: ranks come at times of their own."""
    rng, ranks = np.random.default_rng(count), Ranks(ctypes.CDLL(str(library)), count, patience=PATIENCE)
    sizes = np.exp(rng.uniform(0, np.log(12_000), sums)).astype(int)  # of what runs at a time on 4 multiprocessors
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
