"""Search for undetected bugs of the CUDA kernels: whether the tests find each of many planted bugs.

    python benchmarks/cuda_mutants.py [--only NAME ...]

Bugs are planted in a copy of the kernels' sources, one at a time. The tests must fail with each of them and pass
without. Bugs that exist only on a GPU (a missing barrier, fence or wait) are compiled by nvcc, and their PTX runs on
the host (plugins/tests/ptx) by calls of tests/conformance/ptx_mutants.py. All others are compiled for the host, where
the tests of the kernels run until one fails. This needs nvcc, g++ and about fifteen minutes. Writes
benchmarks/results/cuda-mutants.json: for every mutant the test or message that found it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, save

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.building import make
from plugins.building.ptx import library
from plugins.building.targets import HOST_FLAGS, KERNELS
from plugins.building.tools import PLUGINS, ROOT, host_compiler, run
from tests.conformance.cuda_library import OTHER_LIBRARY, PtxCaller
from tests.conformance.ptx_mutants import CALLS, faults

RESULT = RESULTS / "cuda-mutants.json"
ATTENTION, QUANTIZED, MERGE = KERNELS
# The tests of every source, from the conformance suite too, without the test that compiles its own library.
TESTS = {
    ATTENTION: (
        "test_cuda_on_host.py",
        "test_prefill_on_host.py",
        "test_cuda_heads.py",
        "-k",
        "not outside_of_any_buffer",
    ),
    QUANTIZED: ("test_cuda_quantized.py",),
    MERGE: (
        "test_cuda_on_host.py",
        "test_nearest_on_host.py",
        "test_merge_cache.py",
        "-k",
        "merge or leave or nearest",
    ),
}


class Mutant(NamedTuple):
    """A bug in one file of the kernels."""

    name: str  # A description of the bug
    file: str  # file below plugins/
    old: str  # text that is replaced everywhere in the file
    new: str  # its replacement, with the same number of lines
    unit: str  # source that is compiled
    call: str = ""  # call of `CALLS` that runs the PTX; the tests on the host run if it is empty


BLOCK, ARGUMENTS, DECODE, FLOAT, MMA, SCORES, FEW = (
    f"cuda/{name}.h"
    for name in (
        "core/block",
        "attention/attention",
        "attention/decode",
        "attention/prefill",
        "attention/prefill_mma",
        "attention/prefill_mma_scores",
        "attention/decode_quantized",
    )
)
SELECT, POSITIONS, NEAREST, NEAREST_MMA, SETS, PLACE, WORK = (
    f"cuda/merge/{name}.h" for name in ("select", "positions", "nearest", "nearest_mma", "sets", "place", "work")
)
# Bugs that exist only on a GPU.
ORDERING = (
    Mutant(
        "splits are published without a fence",
        BLOCK,
        "    __threadfence();  // what this thread wrote",
        "    // what this thread wrote",
        ATTENTION,
        "Decode<float, 4>",
    ),
    Mutant(
        "a ticket is read before it is drawn",
        BLOCK,
        "__syncthreads();  // `before` is written",
        "",
        ATTENTION,
        "DecodeMma<Half, 128>",
    ),
    Mutant(
        "the last block reads splits without a fence",
        BLOCK,
        "*counter = 0;\n    __threadfence();",
        "*counter = 0;\n",
        ATTENTION,
        "DecodeMma<Half, 128>",
    ),
    Mutant(
        "tickets are drawn by no atomic operation",
        BLOCK,
        "before = atomicAdd(counter, 1);",
        "before = (*counter)++;",
        QUANTIZED,
        "DecodeQuantized<8, 4, 128>",
    ),
    Mutant(
        "copies are waited for by their own thread alone",
        BLOCK,
        'asm volatile("cp.async.wait_group 2;" ::: "memory");\n    __syncthreads();',
        'asm volatile("cp.async.wait_group 2;" ::: "memory");\n',
        ATTENTION,
        "Decode<float, 4>",
    ),
    Mutant(
        "the end of the used slots is looked for before it is unknown",
        BLOCK,
        "block.each([&](int t, auto&) {\n    if (t < 2) ends[t] = capacity;",
        "block.each_alone([&](int t, auto&) {\n    if (t < 2) ends[t] = capacity;",
        MERGE,
        "Rank",
    ),
    Mutant(
        "prefill multiplies values that are on their way",
        MMA,
        "block.cp_async_wait(0);  // the values are there",
        "block.each([](int, auto&) {});  // values;",
        ATTENTION,
        "PrefillMma<Half, 64>",
    ),
    Mutant(
        "the statistics' rows are not waited for",
        SCORES,
        "block.cp_async_wait(0);  // these rows are there",
        "block.each([](int, auto&) {});  // these rows;",
        ATTENTION,
        "PrefillMma<Half, 64>",
    ),
    Mutant(
        "prefill multiplies keys that are being loaded",
        FLOAT,
        "block.each([&](int t, auto&) { tile.load_keys(head, used, from, count, t, kThreads); });",
        "block.each_alone([&](int t, auto&) { tile.load_keys(head, used, from, count, t, kThreads); });",
        ATTENTION,
        "Prefill<float, 1>",
    ),
    Mutant(
        "counts of the radix select are added to before they are zero",
        SELECT,
        "block.each([&](int t, auto&) { s.counts[t] = 0; });",
        "block.each_alone([&](int t, auto&) { s.counts[t] = 0; });",
        MERGE,
        "Rank",
    ),
    Mutant(
        "bits of positions are set before all are zero",
        POSITIONS,
        "block.each([&](int t, auto&) {\n      for (int i = t; i < kWords; i += kThreads) s.bits[i]",
        "block.each_alone([&](int t, auto&) {\n      for (int i = t; i < kWords; i += kThreads) s.bits[i]",
        MERGE,
        "Place",
    ),
    Mutant(
        "a stage of targets is not waited for",
        NEAREST_MMA,
        "block.cp_async_wait(kStages - 2);",
        "block.each([](int, auto&) {});",
        MERGE,
        "NearestMma<Half, true, 2>",
    ),
    Mutant(
        "targets' squares are used before they are there",
        NEAREST_MMA,
        "block.each([](int, auto&) {});\n  }\n\n  // Multiplies a warp's rows with 16 targets",
        "block.each_alone([](int, auto&) {});\n  }\n\n  // Multiplies a warp's rows with 16 targets",
        MERGE,
        "NearestMma<Half, true, 2>",
    ),
    Mutant(
        "targets' squares are read before they are whole, float32",
        NEAREST,
        "block.each([&](int t, auto&) {\n        keys.target_square[t]",
        "block.each_alone([&](int t, auto&) {\n        keys.target_square[t]",
        MERGE,
        "Nearest<float, false>",
    ),
    Mutant(
        "means are taken before the weights are there",
        SETS,
        "block.each([&](int t, auto&) {\n      if (t == 0) weigh(",
        "block.each_alone([&](int t, auto&) {\n      if (t == 0) weigh(",
        MERGE,
        "MergeRows<Half>",
    ),
    Mutant(
        "holes are filled while entries are written",
        PLACE,
        "block.each([&](int t, auto&) {\n      for (int row = t; row < x.in_all; row += kThreads) entry[row] = kNone;",
        "block.each_alone([&](int t, auto&) {\n      for (int row = t; row < x.in_all; row += kThreads) entry[row] "
        "= kNone;",
        MERGE,
        "Place",
    ),
    Mutant(
        "kernels do not wait for earlier launches",
        BLOCK,
        "block.wait_for_earlier();\n  Kernel::run",
        "Kernel::run",
        MERGE,
        "Order",
    ),
)
# Bugs that exist everywhere.
MEANING = (
    Mutant(
        "every sequence takes the slots of the first",
        ARGUMENTS,
        "slots(static_cast<size_t>(part.batch) *",
        "slots(static_cast<size_t>(part.batch * 0) *",
        ATTENTION,
    ),
    Mutant(
        "a block finds the head before its own",
        "cuda/core/table.h",
        "if (block >= start[entry + step]) entry += step;",
        "if (block > start[entry + step]) entry += step;",
        ATTENTION,
    ),
    Mutant(
        "heads of the second table are named as those of the first",
        "cuda/attention/plan.h",
        "= {first, equal ?",
        "= {entries, equal ?",
        ATTENTION,
    ),
    Mutant(
        "a head takes the slots of the first head of its entry",
        ARGUMENTS,
        "offset = heads.offset + number * capacity;",
        "offset = heads.offset;",
        ATTENTION,
    ),
    Mutant(
        "a head's targets have as many splits as the largest head's",
        WORK,
        "head.own.blocks / (rows",
        "head.work.entry[0].blocks / (rows",
        MERGE,
    ),
    Mutant(
        "a split ends a block early",
        BLOCK,
        "(max_of(items, 0) + unit - 1) / unit,",
        "max_of(items, 0) / unit,",
        ATTENTION,
    ),
    Mutant(
        "a window is one slot longer",
        "cuda/attention/attention.h",
        "position > now - window",
        "position >= now - window",
        ATTENTION,
    ),
    Mutant("sums of probabilities do not decay", DECODE, "[slot] * statistic.decay", "[slot]", ATTENTION),
    Mutant(
        "averages count a group as one head",
        "cuda/attention/plan.h",
        "- std::log(static_cast<float>(a.query_heads / a.heads));",
        "- 0.0f;",
        ATTENTION,
    ),
    Mutant("what an idle lane leaves is stale", DECODE, "args.used[2 * head.index + 1] = 0;", "(void)0;", ATTENTION),
    Mutant(
        "a sink is left out of the sum",
        DECODE,
        "a.sink_logits && t % kWarp == 0 ? expf",
        "a.sink_logits && t % kWarp < 0 ? expf",
        ATTENTION,
    ),
    Mutant(
        "the last split is not combined",
        DECODE,
        "sum[j] = split + i < splits ? sum[j] +",
        "sum[j] = split + i < splits - 1 ? sum[j] +",
        ATTENTION,
    ),
    Mutant("every lane counts the sink", MMA, "sinks && t % 4 == 0 ? 1.0f", "sinks ? 1.0f", ATTENTION),
    Mutant(
        "a block whose last row sees less is not masked",
        MMA,
        "!visible(r.position, w.first + w.tokens(w.end - 1), window)",
        "false",
        ATTENTION,
    ),
    Mutant("of equals the last are evicted", SELECT, "equal++ < left", "equal++ >= r.count + r.scanned - left", MERGE),
    Mutant("recent slots are one fewer", SELECT, "now - head.own.recent)", "now - head.own.recent + 1)", MERGE),
    Mutant("pooling reaches one position less", SELECT, "p.pooled / 2", "(p.pooled - 1) / 2 - 1", MERGE),
    Mutant("a position's own bit counts", POSITIONS, "(1u << at % 32) - 1", "(2u << at % 32) - 1", MERGE),
    Mutant(
        "of equal targets of a split the last",
        NEAREST,
        "candidates.place[i] < place",
        "candidates.place[i] > place",
        MERGE,
    ),
    Mutant("of equal targets an upper one", SETS, "upper_near == near && upper < target", "upper_near == near", MERGE),
    Mutant("the rest of the targets is forgotten", NEAREST, "slots = 0, rest = x.rest;", "slots = 0;", MERGE),
    Mutant("upper slots are no targets", SETS, "upper_near > near ||", "", MERGE),
    Mutant("a slot as important as one of the pool is an upper one", SELECT, "[i] > highest", "[i] >= highest", MERGE),
    Mutant(
        "of the rest of the pool all are of higher importance",
        NEAREST_MMA,
        "if (target.importance > s.row_importance",
        "if (true || target.importance > s.row_importance",
        MERGE,
    ),
    Mutant(
        "of equal targets of two splits the last",
        WORK,
        "head.work.nearness[at] > best",
        "head.work.nearness[at] >= best",
        MERGE,
    ),
    Mutant(
        "distances forget the target's square",
        NEAREST_MMA,
        "-INFINITY : distance ? -x : 0.0f;",
        "-INFINITY : 0.0f;",
        MERGE,
    ),
    Mutant(
        "a merged entry is as old as its target", SETS, "head.position(latest);", "head.position(s.member[0]);", MERGE
    ),
    Mutant("votes have no bound", SETS, "fminf(votes, p.votes_max)", "votes", MERGE),
    Mutant("rows behind the budget stay", PLACE, "row < end; row += kThreads", "row < end - 1; row += kThreads", MERGE),
    Mutant(
        "an entry that moves keeps its votes behind",
        PLACE,
        "for (int k = -1; k < a.statistics; ++k)\n          column",
        "for (int k = 0; k < a.statistics; ++k)\n          column",
        MERGE,
    ),
)
MUTANTS = (*ORDERING, *MEANING)


def planted(mutant: Mutant, folder: Path) -> Path:
    """Return a copy of plugins/ with the bug."""
    copy = folder / "plugins"
    shutil.copytree(PLUGINS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / mutant.file
    text = file.read_text()
    if mutant.old not in text:
        raise ValueError(f"{mutant.name}: {mutant.file} has no {mutant.old!r}")
    file.write_text(text.replace(mutant.old, mutant.new))
    return copy


def on_host(mutant: Mutant, folder: Path) -> str:
    """Return the first test that fails with the bug on the host, or "" if none does.

    Only the mutant's source is compiled again; the other sources come from the unchanged library.
    """
    source, path = planted(mutant, folder) / mutant.unit, folder / "libkvexport_cuda_host.so"
    flags = [*HOST_FLAGS, "-O1", "-Wno-error", "-shared", "-Wl,--no-as-needed", "-x", "c++", str(source), "-x", "none"]
    run([host_compiler(), *flags, str(make.build("cuda-host")), "-o", str(path)], "compiler")
    return failing(path, TESTS[mutant.unit])


def failing(path: Path, tests: tuple[str, ...]) -> str:
    """Return the first test that fails with a library for the host, or the reason why they ended; "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-rf", *(f"tests/conformance/{name}" if name.endswith(".py") else name for name in tests)]
    environment = {**os.environ, OTHER_LIBRARY: str(path), "KVEXPORT_BACKENDS": "cuda-on-host"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=300
        )
    except subprocess.TimeoutExpired:
        return "a test does not end"
    if done.returncode <= 0:
        return f"ended by signal {-done.returncode}" if done.returncode else ""
    match = re.search(r"^FAILED \S+?::(\S+)", done.stdout, re.MULTILINE)
    if not match:  # not a failure of the kernels
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return match[1]


def on_ptx(mutant: Mutant, folder: Path) -> str:
    """Return the message of the PTX runner, which runs in a process of its own because a wrong kernel may end it."""
    base = make.build("cuda-ptx")
    path = library.of_source(base, mutant.unit, planted(mutant, folder), folder / "mutant.so")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(judged, (path, base, mutant.call)).get(timeout=120)
        except multiprocessing.TimeoutError:
            return "the process ended"


def judged(path: Path, base: Path, call: str) -> str:
    """Return the difference of a library's results from those of `base`, or ""."""
    caller = PtxCaller(base)
    caller.set_order(0, late=False, multiprocessors=9)
    return faults(path, call, CALLS[call](caller))


def as_they_are() -> dict[str, str]:
    """Return the faults that are reported for the unchanged kernels, by test source or call."""
    host, ptx = make.build("cuda-host"), make.build("cuda-ptx")
    failures = {unit: failing(host, names) for unit, names in TESTS.items()}
    failures |= {call: judged(ptx, ptx, call) for call in CALLS}
    print("unchanged", failures, flush=True)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", metavar="NAME", help="run only mutants whose names begin with it; results of others stay"
    )
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.only or any(m.name.startswith(name) for name in options.only)]
    rows: dict[str, Any] = {}
    unchanged = {} if options.only else as_they_are()
    with tempfile.TemporaryDirectory() as temporary:
        for i, mutant in enumerate(mutants):
            folder = Path(temporary, str(i))
            by = on_ptx(mutant, folder) if mutant.call else on_host(mutant, folder)
            rows[mutant.name] = {"file": mutant.file, "run as": "PTX" if mutant.call else "host", "detected by": by}
            print(mutant.name, "|", by or "MISSED", flush=True)
            shutil.rmtree(folder)
    missed = [name for name, row in rows.items() if not row["detected by"]]
    if RESULT.exists() and options.only:
        held = json.loads(RESULT.read_text())["mutants"]
        rows = {m.name: rows.get(m.name) or held[m.name] for m in MUTANTS if m.name in {*rows, *held}}
    count = sum(bool(row["detected by"]) for row in rows.values())
    save("cuda-mutants", {"detected": f"{count} of {len(rows)}", "mutants": rows})
    if missed or any(unchanged.values()):
        sys.exit(f"missed: {missed}; unchanged and yet found: {unchanged}")


if __name__ == "__main__":
    main()
