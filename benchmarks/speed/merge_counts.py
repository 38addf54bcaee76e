"""Predicted time of a merge on a GPU, from counts of instructions and bytes; no GPU is needed, and no time is measured.

    python benchmarks/speed/merge_counts.py [--library LIBRARY]

The case is a layer of Llama-2-7B's shape in float16 (32 KV heads of 128) with a budget of 2,048 slots. Each head has 32
slots more, with positions in any order, as merges leave them. The PTX of every launch runs on the host
(docs/measurements/cuda.md) for two heads, with as many blocks for a head as on a GPU of 132 multiprocessors. A launch
takes the longest of

    bytes of the cache that it reads and writes, and some of each slot for its numbers / bandwidth
    instructions of all warps / 4 a cycle and multiprocessor
    instructions of its longest thread, one in 6 cycles (in `Nearest`, whose products do not wait for each other, one in
        2), times the waves of its blocks
    products / 60 % of 989 TFLOP/s

and 2 us for the launch. A step is the time of its bytes: weights and cache. The launches in per-head budgets are
those that the library checks for a layer whose heads have budgets of 1,024 to 3,008 slots. Writes
benchmarks/results/merge_counts.json and prints the tables of docs/measurements/cuda.md.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import options_of, save
from kvexport.methods import all_methods
from kvexport.ops.merge_cache import MergeCacheAttributes
from plugins.building import make
from tests.conformance.cuda_library import PtxCaller, checked_launches, merge_cache_call

LAYERS, HEADS, SIZE, BUDGET, EVICTED, CAPACITY, RECENT = 32, 32, 128, 2048, 32, 2560, 64
USED, ROW, WEIGHTS = BUDGET + EVICTED, 2 * SIZE, 13.5e9  # ROW: bytes of a key; WEIGHTS: bytes of all weights in 16 bits
MULTIPROCESSORS, CLOCK, ISSUED, LAUNCH, PRODUCTS = 132, 1.75e9, 4, 2e-6, 0.6 * 989e12
BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}  # 90 % of the published bandwidths
BATCHES, METHODS, EVERY = (1, 8, 32), ("h2o", "keepkv", "ballot"), 32


class Launch(NamedTuple):
    """A launch of a method."""

    program: str  # kernel
    resident: int  # blocks that fit into a multiprocessor
    slot: int  # bytes of each slot's numbers
    bytes: float = 0.0  # bytes of a head's keys and values
    flop: float = 0.0  # operations of a head's products


def nearest(rows: int, targets: int, *, by_error: bool) -> Launch:
    """Return the launch that looks for the nearest target of each row; squares are products of 16 more rows."""
    size = 2 * SIZE if by_error else SIZE
    name = f"NearestMma<kv::cuda::Half, {str(by_error).lower()}, 2>"
    return Launch(name, 2, 0, 2 * size * (targets + rows) + 9 * targets, 2 * (rows + 16) * targets * size)


def launches_of(method: str) -> list[Launch]:
    """Return the launches of `run` in plugins/cuda/merge/merge_cache.cu."""
    pool = EVICTED * getattr(all_methods()[method](), "pool", 1)
    moved = EVICTED * 2 * ROW
    rest = pool + (RECENT if method == "ballot" else 0)  # recent slots are not in the eviction pool
    pairs = [
        nearest(pool, USED, by_error=method == "ballot"),
        Launch("Choose", 5, 16),
        nearest(EVICTED, rest, by_error=False),
        Launch("FormSets", 5, 4),
        Launch("MergeRows<kv::cuda::Half>", 8, 0, 3 * moved),
    ]
    ends = [Launch("Order", 6, 16), Launch("Place", 16, 0, 3 * moved)]
    return [Launch("Rank", 4, 32), *(pairs if method != "h2o" else []), *ends]


def counted(caller: PtxCaller, method: str, batch: int) -> list[tuple[float, float]]:
    """Return for every launch the warps' instructions for a head, and those of its longest thread.

    Two launches of one program are counted together, and share the count in proportion to their products.
    """
    heads = 2
    caller.set_order(0, late=False, multiprocessors=max(1, round(MULTIPROCESSORS * heads / (HEADS * batch))))
    rng, method_object, shape = np.random.default_rng(5), all_methods()[method](), (1, heads, CAPACITY)
    state: dict[str, Any] = {name: rng.normal(size=(*shape, SIZE)).astype(np.float16) for name in ("key", "value")}
    state["key"][:, :, 1:USED:2] = state["key"][:, :, 0:USED:2]  # so that all evicted entries merge
    state["votes"] = np.broadcast_to((np.arange(CAPACITY) < USED).astype(np.float32), shape).copy()
    state["score"] = rng.gamma(1.0, size=(1, heads, len(method_object.statistics), CAPACITY)).astype(np.float32)
    order = np.stack([rng.permutation(USED) for _ in range(heads)])[None] * 50
    state["position"] = np.concatenate([order, np.zeros((1, heads, CAPACITY - USED))], -1).astype(np.int32)
    launches = launches_of(method)
    programs = [f"kv::cuda::{launch.program}" for launch in launches]
    for program in programs:
        caller.instructions(program, 1), caller.instructions(program, 2)
    caller.merge_cache(state, MergeCacheAttributes(method_object, BUDGET, 4, RECENT))
    counts = {x: (caller.instructions(x, 1) / heads, caller.instructions(x, 2)) for x in dict.fromkeys(programs)}
    rows = []
    for launch in launches:
        issued, longest = counts[f"kv::cuda::{launch.program}"]
        same = [other.flop for other in launches if other.program == launch.program]
        rows.append(
            (issued * launch.flop / sum(same), longest * launch.flop / max(same))
            if len(same) > 1
            else (issued, longest)
        )
    return rows


def launches_in_budgets(caller: PtxCaller, method: str) -> dict[str, Any]:
    """Return the launches of a merge of a layer in equal budgets, and in per-head ones: a call for each, and one."""
    method_object, budgets = all_methods()[method](), [1024 + 64 * h for h in range(HEADS)]
    attributes = [MergeCacheAttributes(method_object, budget, 4, RECENT) for budget in budgets]

    def launches(every: list[MergeCacheAttributes]) -> int:
        capacity = [own.budget + EVICTED for own in every]
        shape = (1, len(every), max(capacity), SIZE)
        call = merge_cache_call(every, "float16", shape, SIZE, len(method_object.statistics), capacity)
        caller.library.kv_host_set(0, 0, MULTIPROCESSORS, 232448)  # forgets the launches before
        return len(checked_launches(caller.library, "merge_cache", ctypes.byref(call)))

    return {
        "method": method,
        "equal budgets": launches([replace(attributes[0], budget=BUDGET)] * HEADS),
        "a call for each head": sum(launches([own]) for own in attributes),
        "now": launches(attributes),
    }


def blocks_of(program: str, batch: int) -> int:
    """Return the blocks of a launch, as the library plans them (tests/conformance/test_cuda_plans.py)."""
    heads = HEADS * batch
    each = {"Place": 8, "MergeRows<kv::cuda::Half>": min(32, max(1, 16 * MULTIPROCESSORS // heads))}
    return heads * (max(1, 2 * MULTIPROCESSORS // heads) if program.startswith("Nearest") else each.get(program, 1))


def row_of(launch: Launch, counts: tuple[float, float], batch: int) -> dict[str, Any]:
    """Return the row of a launch at a batch: the microseconds of each bound, for one layer."""
    heads, (instructions, longest) = HEADS * batch, counts
    cycles = 2 if launch.flop else 6
    waves = -(-blocks_of(launch.program, batch) // (MULTIPROCESSORS * launch.resident))
    of_bytes = heads * (launch.bytes + launch.slot * USED)
    took = {
        "issue": heads * instructions / (MULTIPROCESSORS * ISSUED * CLOCK),
        "longest thread": waves * longest * cycles / CLOCK,
        "products": heads * launch.flop / PRODUCTS,
    }
    took |= {f"bytes, {gpu}": of_bytes / bandwidth for gpu, bandwidth in BANDWIDTH.items()}
    alike = max(took["issue"], took["longest thread"], took["products"])
    took |= {gpu: max(alike, took[f"bytes, {gpu}"]) + LAUNCH for gpu in BANDWIDTH}
    return {
        "launch": launch.program.replace("kv::cuda::", ""),
        "instructions of warps of a head": round(instructions),
        "instructions of the longest thread": round(longest),
        "megabytes": round(of_bytes / 1e6, 1),
        "microseconds": {name: round(1e6 * x, 1) for name, x in took.items()},
    }


def step_seconds(batch: int, bandwidth: float) -> float:
    """Return the seconds of a step without merges: the time of its bytes."""
    return (WEIGHTS + batch * HEADS * LAYERS * (BUDGET + EVERY / 2) * 2 * ROW) / bandwidth


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--library", type=Path, help="a library in place of the target cuda-ptx")
    caller = PtxCaller(parser.parse_args().library or make.build("cuda-ptx"))
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        few, many = counted(caller, method, 1), counted(caller, method, 32)
        for batch in BATCHES:
            counts = few if batch == 1 else many
            launches = [row_of(*pair, batch) for pair in zip(launches_of(method), counts, strict=True)]
            row: dict[str, Any] = {"method": method, "batch": batch, "launches": launches}
            for gpu, bandwidth in BANDWIDTH.items():
                merge = 1e-6 * sum(launch["microseconds"][gpu] for launch in launches)
                step = step_seconds(batch, bandwidth)
                with_merges = step + LAYERS * merge / EVERY
                first = next((x[gpu]["step with merges, ms"] for x in rows if x["batch"] == batch), None)
                row[gpu] = {
                    "merge of a layer, ms": round(1e3 * merge, 3),
                    "step, ms": round(1e3 * step, 3),
                    "step with merges, ms": round(1e3 * with_merges, 3),
                    "with over without": round(with_merges / step, 3),
                    "of h2o": round((first or 1e3 * with_merges) / (1e3 * with_merges), 3),
                }
            rows.append(row)
            show(row)
    in_budgets = [launches_in_budgets(caller, method) for method in METHODS]
    print("\nlaunches of a merge of a layer in per-head budgets", *in_budgets, sep="\n")
    save("merge_counts", {"rows": rows, "launches in per-head budgets": in_budgets})


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['method']}, batch {row['batch']}", *(f"{gpu} {row[gpu]}" for gpu in BANDWIDTH), sep="\n")
    for x in row["launches"]:
        counts = (x["instructions of warps of a head"], x["instructions of the longest thread"], x["megabytes"])
        print("|", x["launch"], *counts, *x["microseconds"].values(), sep=" | ")


if __name__ == "__main__":
    main()
