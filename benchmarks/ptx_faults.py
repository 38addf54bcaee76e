"""Search for faults that the PTX runner does not find, in the CUDA kernels without one barrier, fence, wait or commit.

    python benchmarks/ptx_faults.py [--each 4] [--only PROGRAM ...]

In every kernel of the list each of these instructions is removed alone. Only `--each` barriers of a kernel are
removed, evenly spread. Writes benchmarks/results/ptx_faults.json: for every removal its place and how it was found: by
a report or by other bits. A trap in place of the instruction tells whether the calls reach it at all. Removals that run
and are not found are listed: a barrier beside another one, or a wait while no copy is under way.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, save

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.building import make
from plugins.building.ptx import library
from tests.conformance.cuda_library import PtxCaller
from tests.conformance.ptx_mutants import CALLS, KINDS, MULTIPROCESSORS, found, places, without

RESULT = RESULTS / "ptx_faults.json"
ENDED = "the process ended"
NEVER = "the calls do not come by"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument(
        "--only", nargs="*", metavar="PROGRAM", help="programs of CALLS to test; results of others stay"
    )
    options = parser.parse_args()
    make.build("cuda-ptx")
    bodies, rows = {name: kernel.body for name, kernel in library.compiled().items()}, []
    for program in options.only or CALLS:
        for kind in KINDS:
            there = places(bodies[program], kind)
            count = min(options.each, len(there)) if kind == "barrier" else len(there)
            for which in [(2 * i + 1) * len(there) // (2 * count) for i in range(count)]:
                rows.append(row(program, kind, which, line(bodies[program], there[which][0])))
                print(rows[-1], flush=True)
    if options.only and RESULT.exists():
        rows += [one for one in json.loads(RESULT.read_text())["rows"] if one["program"] not in options.only]
        rows = sorted((one for one in rows if one["program"] in CALLS), key=lambda one: [*CALLS].index(one["program"]))
    run = [one for one in rows if one["runs"]]
    left = [one for one in run if not one["detected by"]]
    summary = {"removed": len(rows), "that run": len(run), "detected": len(run) - len(left), "undetected": left}
    save("ptx_faults", {**summary, "rows": rows})


def line(body: str, at: int) -> str:
    """Return FILE:LINE of the source of an instruction, with the file's number."""
    known = re.findall(r"\.loc\s+(\d+)\s+(\d+)", body[:at])
    return ":".join(known[-1]) if known else "?"


def row(program: str, kind: str, which: int, source: str) -> dict[str, Any]:
    """Return the row of one removal, which runs in a process of its own because a faulty kernel may end it."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(1) as pool:
        result = pool.apply_async(judged, (program, kind, which, str(Path(folder) / "mutant.so")))
        try:
            by = result.get(timeout=300)
        except multiprocessing.TimeoutError:
            by = ENDED
    return {
        "program": program,
        "removed": kind,
        "number": which,
        "line": source,
        "runs": by != NEVER,
        "detected by": by,
    }


def judged(program: str, kind: str, which: int, path: str) -> str:
    """Return how the removal was found, or NEVER if the calls do not reach it."""
    caller = PtxCaller(make.build("cuda-ptx"))
    caller.set_order(0, late=False, multiprocessors=MULTIPROCESSORS)
    by = found(program, without(kind, which), Path(path), CALLS[program](caller))
    return by or ("" if found(program, without(kind, which, "trap;"), Path(path + ".trap")) else NEVER)


if __name__ == "__main__":
    main()
