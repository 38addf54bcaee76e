"""Random calls of the CPU kernels under sanitizers; the counts of all runs are added up.

    python benchmarks/correctness/fuzz.py address,undefined --minutes 10
    python benchmarks/correctness/fuzz.py thread --minutes 10
    python benchmarks/correctness/fuzz.py address,undefined --small --minutes 10  # more and smaller calls

Builds kv_fuzz with the sanitizers and runs it with seeds that no earlier run has used. For each choice of sanitizers,
results/fuzz.json keeps the calls and cases of all runs, the next seed, and the seeds of cases that failed. Add a
failing case to plugins/tests/fuzz_seeds.txt, whose cases `make fuzz` and the tests run first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import ROOT, earlier, save

FIRST_SEED = 1_000_000  # the tests use smaller ones
PART = {"": 25, "small": 2500}  # cases in a process, since a failure ends the process


def program(sanitizers: str) -> list[str]:
    """Build kv_fuzz with sanitizers and return its command."""
    build = ROOT / "build-cache" / f"fuzz-{sanitizers.partition(',')[0]}"
    subprocess.run(["cmake", "-S", ROOT / "plugins", "-B", build, f"-DKV_SANITIZE={sanitizers}"], check=True, stdout=2)
    subprocess.run(["cmake", "--build", build, "--target", "kv_fuzz", "--parallel", "2"], check=True, stdout=2)
    command = [str(build / "kv_fuzz")]
    # ThreadSanitizer of GCC 12 knows only some of the addresses that newer kernels give.
    return ["setarch", "-R", *command] if sanitizers == "thread" else command


def run(command: list[str], kind: str, seed: int, minutes: float) -> dict[str, Any]:
    """Run kv_fuzz in parts until the time is over.

    Returns:
        The figures: cases, calls, seconds, the next seed, and the seeds of failing cases with their messages.
    """
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    begun, cases, calls, failures, isa = time.monotonic(), 0, 0, dict[str, str](), ""
    while time.monotonic() - begun < 60 * minutes:
        done = subprocess.run(
            [*command, str(seed), str(PART[kind]), *filter(None, [kind])],
            capture_output=True,
            text=True,
            env=environment,
        )
        if counted := re.search(r"^(\w+): (\d+) cases of each operator, (\d+) calls", done.stdout, re.MULTILINE):
            isa, cases, calls = counted[1], cases + int(counted[2]), calls + int(counted[3])
        else:
            failing = re.search(r"^kv_fuzz (\d+) 1", done.stderr, re.MULTILINE)
            failures[failing[1] if failing else f"{seed} to {seed + PART[kind] - 1}"] = done.stderr[-2000:]
            print(done.stderr[-4000:], file=sys.stderr)
        seed += PART[kind]
    seconds = round(time.monotonic() - begun)
    return {"isa": isa, "cases": cases, "calls": calls, "seconds": seconds, "next seed": seed, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sanitizers", choices=["address,undefined", "thread"])
    parser.add_argument("--small", action="store_true", help="make only calls of small shapes")
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    kept = earlier("fuzz").get("sanitizers", {})
    kind = "small" if arguments.small else ""
    name = " ".join(filter(None, [arguments.sanitizers, kind]))
    before = kept.get(name, {"cases": 0, "calls": 0, "seconds": 0, "runs": 0, "failures": {}})
    figures = run(program(arguments.sanitizers), kind, before.get("next seed", FIRST_SEED), arguments.minutes)
    kept[name] = {
        "isa": figures["isa"],
        **{count: before[count] + figures[count] for count in ("cases", "calls", "seconds")},
        "runs": before["runs"] + 1,
        "next seed": figures["next seed"],
        "failures": {**before["failures"], **figures["failures"]},
    }
    print(json.dumps(kept[name], indent=1))
    save("fuzz", {"sanitizers": kept})
    sys.exit(bool(figures["failures"]))


if __name__ == "__main__":
    main()
