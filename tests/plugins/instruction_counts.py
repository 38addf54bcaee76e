"""Count the instructions of a warp in the CUDA kernels, per slot or pair of slots.

    python -m tests.plugins.instruction_counts    rewrites plugins/cuda/instructions.json

Each count is the difference of the instructions of two calls, whose PTX runs on the host, divided by the difference of
their slots or evicted slots, so that fixed costs cancel out. PTX has more instructions than the machine code, because
ptxas merges some. Both rise and fall together. The file also has the round trips to memory that wait for one another
(plugins/building/ptx/trips.py) in one thread of a call, and the instructions of a decode step and of a merge in
per-head budgets over those in equal budgets.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.methods import all_methods
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from plugins.building import make, resources
from plugins.building.ptx import library, trips
from plugins.building.ptx.read import Kernel
from tests.conformance.cuda_library import PtxCaller
from tests.conformance.quantized import BITS, small
from tests.support.paths import ROOT

RECORD = ROOT / "plugins" / "cuda" / "instructions.json"
WARP, SIZE, SLOTS = 32, 128, (256, 512)
DECODE = (
    *(("float16", group, "DecodeMma<kv::cuda::Half, 128>") for group in (1, 4, 8, 16)),
    ("float32", 4, "Decode<float, 4>"),
    ("float32", 8, "Decode<float, 8>"),
    *(("int8", group, "DecodeQuantized<8, 8, 128>") for group in (1, 4, 8)),
    *(("int4", group, "DecodeQuantized<4, 4, 128>") for group in (4, 8)),
)
LOG_EMA = (Statistic("log_ema", 0.9),)
BUDGETS = (64, 96, 128, 192, 256, 320, 416, 576)  # slots of KV heads
BUDGET = sum(BUDGETS) // len(BUDGETS)
# Whole tiles: the tensor cores of a prompt compute a tile of up to 128 slots even if most of it is empty.
PROMPT_BUDGETS = (128, 128, 128, 128, 256, 256, 384, 640)
EQUAL = (BUDGET,) * len(BUDGETS)
# The type of a cache, the tokens of a call, and its programs.
QUANTIZED = ("Prefill<kv::cuda::Quantized, 1>", "PrefillScores<kv::cuda::Quantized>")
CALLS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("float16", 1, ("DecodeMma<kv::cuda::Half, 128>",)),
    ("float32", 1, ("Decode<float, 1>",)),
    ("int8", 1, ("AppendQuantized", "DecodeQuantized<8, 8, 128>")),
    ("int4", 1, ("AppendQuantized", "DecodeQuantized<4, 4, 128>")),
    ("float16", 48, tuple(f"{x}<kv::cuda::Half, 64>" for x in ("PrefillMma", "PrefillMmaScores"))),
    ("float32", 16, ("Append<float>", "Prefill<float, 1>", "PrefillScores<float>")),
    ("int8", 16, ("AppendQuantized", *QUANTIZED)),
)
LATEST = max(*BUDGETS, *PROMPT_BUDGETS)
EVICTED = 32
MERGES = {"h2o": ("Rank", "Order", "Place")}
MERGES["keepkv"] = (*MERGES["h2o"], "NearestMma<kv::cuda::Half, false, 2>", "Choose", "FormSets")
MERGES["keepkv"] += ("MergeRows<kv::cuda::Half>",)
MERGES["ballot"] = (*MERGES["keepkv"], "NearestMma<kv::cuda::Half, true, 2>")


def measured(caller: PtxCaller) -> dict[str, float]:
    """Return the instructions of a warp for every figure.

    Heads have 128 elements and one statistic. Merges are in float16 unless the figure names another type.
    """
    figures = {}
    for dtype, group, program in DECODE:
        figures[f"decode, {dtype}, group {group}, per slot"] = _difference(
            caller, program, lambda slots, d=dtype, g=group: _decode(caller, d, g, slots), SLOTS[1] - SLOTS[0]
        )
    pairs = EVICTED * (SLOTS[1] - SLOTS[0])
    for name, dtype, method, program in (
        ("nearest target by key, per pair", "float16", "zeromerge", "NearestMma<kv::cuda::Half, false, 2>"),
        ("nearest target by error, per pair", "float16", "ballot", "NearestMma<kv::cuda::Half, true, 2>"),
        ("nearest target by key, float32, per pair", "float32", "zeromerge", "Nearest<float, false>"),
        ("order of slots, per slot", "float16", "h2o", "Rank"),
    ):
        pool = getattr(all_methods()[method](), "pool", 1) if "error" in name else 1
        over = pairs * pool if "pair" in name else SLOTS[1] - SLOTS[0]
        figures[name] = _difference(
            caller, program, lambda slots, m=method, d=dtype: _merge(caller, m, slots, EVICTED, d), over
        )
    figures["key and value moved, per evicted slot"] = _difference(
        caller, "Place", lambda count: _merge(caller, "h2o", SLOTS[0], count, "float16"), 32, (32, 64)
    )
    return {name: round(count, 2) for name, count in figures.items()}


def measured_trips(caller: PtxCaller) -> dict[str, int]:
    """Return the dependent memory accesses of the first thread of the last block, for each recorded kernel call."""
    kernels, figures = library.compiled(), {}
    caller.set_order(0, late=False, multiprocessors=16)  # so many splits
    _decode(caller, "float16", 4, SLOTS[1])
    figures["decode, float16, group 4, 16 splits"] = _trips(caller, kernels, "DecodeMma<Half, 128>")
    caller.set_order(0, late=False, multiprocessors=1)
    return figures


def measured_budgets(caller: PtxCaller) -> dict[str, float]:
    """Return the instructions of steps, prompts and merges in per-head budgets over those in equal budgets as large.

    All slots are used but those of a call's new tokens, and a merge evicts 32 slots of each head. The ratio of slots to
    places of thread blocks is that of Llama-2-7B (32 KV heads, 1,024 slots of each, one sequence) on an H200, and that
    of eight sequences.
    """
    figures = {}
    for sequences, multiprocessors in (("one sequence", 8), ("eight sequences", 1)):
        caller.set_order(0, late=False, multiprocessors=multiprocessors)
        for dtype, tokens, programs in CALLS:
            if tokens > 1 and multiprocessors == 1:
                continue  # prompts have no splits
            unequal = BUDGETS if tokens == 1 else PROMPT_BUDGETS
            counts = [
                _counted(caller, programs, lambda x=capacities, d=dtype, t=tokens: _attend_heads(caller, d, x, t))
                for capacities in (unequal, EQUAL)
            ]
            kind = "decode" if tokens == 1 else f"{tokens} tokens"
            figures[f"{kind}, {dtype}, {sequences}"] = round(counts[0] / counts[1], 4)
        for method, names in MERGES.items():
            counts = [
                _counted(caller, names, lambda x=budgets, m=method: _merge_heads(caller, m, x))
                for budgets in (BUDGETS, EQUAL)
            ]
            figures[f"merge, {method}, {sequences}"] = round(counts[0] / counts[1], 4)
    caller.set_order(0, late=False, multiprocessors=1)
    return dict(sorted(figures.items()))


def _counted(caller: PtxCaller, programs: Sequence[str], run: Any) -> int:
    names = [f"kv::cuda::{program}" for program in programs]
    for name in names:
        caller.instructions(name)
    run()
    counts = [caller.instructions(name) for name in names]
    assert all(counts), dict(zip(programs, counts, strict=True))
    return sum(counts)


def _merge_heads(caller: PtxCaller, method: str, budgets: Sequence[int]) -> None:
    method_object, states, rng = all_methods()[method](), [], np.random.default_rng(3)
    for budget in budgets:
        slots = budget + EVICTED
        state = _state(slots, slots, len(method_object.statistics))
        state["position"] = rng.permutation(slots).astype(np.int32)[None, None]
        states.append(state)
    attributes = [MergeCacheAttributes(method_object, budget, 4, 16) for budget in budgets]
    caller.merge_cache_of(states, attributes)


def _attend_heads(caller: PtxCaller, dtype: str, capacities: Sequence[int], tokens: int) -> None:
    """Run tokens over KV heads of these capacities in one call.

    Heads have 128 elements; those of a float16 prompt have 64, the size whose program runs on the host.
    """
    heads, rng, size = [], np.random.default_rng(5), 64 if dtype == "float16" and tokens > 1 else SIZE
    row_type = "float16" if dtype in BITS else dtype
    for capacity in capacities:
        rows = {x: rng.normal(size=(1, 1, tokens, size)).astype(row_type) for x in ("query", "key", "value")}
        state = {f"past_{x}": y for x, y in _state(capacity - tokens, capacity, 1, dtype, size).items()}
        position = np.arange(LATEST, LATEST + tokens)[None]  # no slot of any head is in the tokens' future
        heads.append(rows | state | {"position": position, "query_length": np.array([[tokens]])})
    caller.vote_attention_of(heads, VoteAttentionAttributes(size**-0.5, 1.0, LOG_EMA))


def _trips(caller: PtxCaller, kernels: dict[str, Kernel], program: str) -> int:
    namespaced = program.replace("<", "<kv::cuda::") if "<Half" in program else program
    return trips.along(trips.stretches(kernels[program]), caller.stretches(f"kv::cuda::{namespaced}"))


def _difference(caller: PtxCaller, program: str, run: Any, over: int, sizes: tuple[int, int] = SLOTS) -> float:
    counts = []
    for size in sizes:
        caller.instructions(f"kv::cuda::{program}")
        run(size)
        counts.append(caller.instructions(f"kv::cuda::{program}"))
    return (counts[1] - counts[0]) / WARP / over


def _state(
    slots: int, capacity: int, statistics: int, dtype: str = "float16", size: int = SIZE
) -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(1), (1, 1, capacity)
    state = {name: rng.normal(size=(*shape, size)) for name in ("key", "value")}
    state = small(state, dtype) if dtype in BITS else {name: x.astype(dtype) for name, x in state.items()}
    state["votes"] = (np.arange(capacity) < slots).astype(np.float32).reshape(shape)
    state["score"] = rng.gamma(1.0, size=(1, 1, statistics, capacity)).astype(np.float32)
    return state | {"position": np.arange(capacity, dtype=np.int32).reshape(shape)}


def _decode(caller: PtxCaller, dtype: str, group: int, slots: int) -> None:
    rng, capacity = np.random.default_rng(2), SLOTS[1] + 32
    state = _state(slots, capacity, 1, dtype)
    dtype = "float16" if dtype in BITS else dtype
    inputs = {"query": rng.normal(size=(1, group, 1, SIZE)).astype(dtype)}
    inputs |= {name: rng.normal(size=(1, 1, 1, SIZE)).astype(dtype) for name in ("key", "value")}
    inputs |= {"position": np.array([[slots]]), "query_length": np.array([[1]])}
    inputs |= {f"past_{name}": x for name, x in state.items()}
    caller.vote_attention(inputs, VoteAttentionAttributes(SIZE**-0.5, 1.0, LOG_EMA))


def _merge(caller: PtxCaller, method: str, slots: int, evicted: int, dtype: str) -> None:
    method_object = all_methods()[method]()
    state = _state(slots, slots, len(method_object.statistics), dtype)
    # The order is random, as merges leave slots. The highest position is fixed, so that positions have as many digits.
    state["position"] = np.random.default_rng(3).permutation(slots).astype(np.int32)[None, None] * (4095 // slots)
    caller.merge_cache(state, MergeCacheAttributes(method_object, slots - evicted, 4, 64))


def record(library: Path) -> None:
    caller = PtxCaller(library)
    caller.set_order(0, late=False, multiprocessors=1)
    held = {"compiler": resources.compiler_version(), "instructions of a warp": measured(caller)}
    held["round trips of a call"] = measured_trips(caller)
    held["per-head budgets over equal ones"] = measured_budgets(caller)
    RECORD.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    record(make.build("cuda-ptx"))
