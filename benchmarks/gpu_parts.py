"""The parts of `gpu_check` that build and measure: each takes a target and returns its figures, or raises what it found wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda_library import (
    DEVICE,
    HOST,
    STATE,
    Caller,
    DeviceMemory,
    HostMemory,
    builder,
    load,
    merge_cache_call,
    vote_attention_call,
)

Figures = dict[str, Any]


class Skipped(Exception):
    """A part that this machine lacks something for."""


# Batch, query heads, KV heads, slots; head size 128, fp16. Llama-2-7B's layers, then Llama-3-8B's.
DECODE = [(1, 32, 32, 512), (8, 32, 32, 1024), (32, 32, 32, 1024), (1, 32, 8, 4096), (8, 32, 8, 4096), (32, 32, 8, 4096), (1, 32, 8, 16384)]
SIZE, CHUNK, MERGE_EVERY = 128, 512, 32


class Target:
    """The library under test and how its calls are timed: on a GPU by events around a graph's replay, on the host by the clock."""

    def __init__(self, *, on_host: bool) -> None:
        self.on_host = on_host
        self._caller: Caller | None = None

    @property
    def caller(self) -> Caller:
        """Loaded when it is first asked for: `build` makes it."""
        if self._caller is None:
            self._caller = Caller(load(HOST), HostMemory()) if self.on_host else Caller(load(DEVICE), DeviceMemory())
        return self._caller

    def scaled(self, number: int, on_host: int) -> int:
        """`number`, or what the host can do in its place."""
        return on_host if self.on_host else number

    def seconds(self, calls: list[Callable[[], Any]], reset: Callable[[], None] = lambda: None, rounds: int = 15) -> list[float]:
        """Of `rounds` runs of all calls in turn, the seconds per call; `reset` runs before each, outside of the time."""
        if self.on_host:
            return [self._timed(calls, reset) for _ in range(2)]
        import torch

        memory, stream = self.caller.memory, torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        default, memory.stream = memory.stream, stream.cuda_stream
        with torch.cuda.stream(stream):
            reset()
            for call in calls:
                call()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for call in calls:
                    call()
            found = []
            for i in range(rounds + 3):
                reset()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if i >= 3:
                    found.append(start.elapsed_time(end) / 1e3 / len(calls))
        memory.stream = default
        return found

    def _timed(self, calls: list[Callable[[], Any]], reset: Callable[[], None]) -> float:
        reset()
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)


def build(target: Target) -> Figures:
    """The library, and what the compiler says of every kernel: nothing may spill."""
    if target.on_host:
        return {"library": builder().build_host().name}
    import torch

    major, minor = torch.cuda.get_device_capability()
    library, report = builder().build_device(f"{major}{minor}")
    spilling = [name for name, numbers in report.items() if numbers["spills"]]
    assert not spilling, f"registers spill in {', '.join(spilling)}"
    return {"library": library.name, "compiler": builder().compiler_version(), "kernels": report}


INPUTS = ("query", "key", "value", "position", "query_length", *(f"past_{name}" for name in STATE))


def attributes_of(kind: str) -> Any:
    from kvexport.methods.base import Statistic
    from kvexport.ops.vote_attention import VoteAttentionAttributes

    kinds = {"log_ema": (Statistic("log_ema", 0.9),), "probability": (Statistic("probability"),), "none": (Statistic(),)}
    kinds["both"] = (Statistic("probability", 0.98), Statistic("log_ema", 0.95))
    return VoteAttentionAttributes(SIZE**-0.5, 1.0, kinds[kind])


def layer(
    batch: int, query_heads: int, heads: int, slots: int, tokens: int, kept: int, dtype: str, size: int = SIZE
) -> dict[str, np.ndarray]:
    """A layer's inputs: `slots` used, room for `tokens` more. What large tensors hold repeats, which nothing here depends on."""
    rng = np.random.default_rng(0)
    capacity = slots + tokens
    shape = (batch, heads, capacity)

    def normal(*dims: int) -> np.ndarray:
        count = int(np.prod(dims))
        some = rng.normal(size=min(count, 1 << 20)).astype(dtype)
        return np.resize(some, count).reshape(dims)

    votes = np.ones(shape, np.float32)
    votes[:, :, slots:] = 0
    return {
        "query": normal(batch, query_heads, tokens, size),
        "key": normal(batch, heads, tokens, size),
        "value": normal(batch, heads, tokens, size),
        "position": np.broadcast_to(slots + np.arange(tokens), (batch, tokens)).copy(),
        "query_length": np.full((batch, 1), tokens),
        "past_key": normal(*shape, size),
        "past_value": normal(*shape, size),
        "past_votes": votes,
        "past_score": rng.gamma(1.0, size=(batch, heads, kept, capacity)).astype(np.float32),
        "past_position": np.broadcast_to(np.arange(capacity, dtype=np.int32), shape).copy(),
    }


class Step:
    """One layer on the target with its call prepared, in place."""

    def __init__(self, target: Target, arrays: dict[str, np.ndarray], attributes: Any) -> None:
        memory = target.caller.memory
        self.memory, self.target = memory, target
        self.held = {name: memory.put(x) for name, x in arrays.items()}
        self.votes = memory.put(arrays["past_votes"])
        query, key = arrays["query"], arrays["past_key"]
        self.output = memory.put(np.zeros((*query.shape[:3], arrays["value"].shape[3]), query.dtype))
        call = vote_attention_call(attributes, query.dtype.name, query.shape, key.shape, arrays["value"].shape[3])
        for name in INPUTS[:5]:
            setattr(call, name, memory.address(self.held[name]))
        call.past = call.present = target.caller.state({name: self.held[f"past_{name}"] for name in STATE})
        call.output = memory.address(self.output)
        self.call = call

    def __call__(self) -> None:
        """Enqueue it."""
        self.target.caller.prepared("vote_attention", self.call)()

    def reset(self) -> None:
        """What the last step appended goes."""
        if self.target.on_host:
            self.held["past_votes"][...] = self.votes
        else:
            self.held["past_votes"].copy_(self.votes)


def merge_state(
    target: Target, method: str, batch: int, heads: int, budget: int, seed: int, *, in_order: bool = True
) -> tuple[dict[str, np.ndarray], Any]:
    """A cache that is MERGE_EVERY slots over its budget, and the attributes of its merge."""
    from kvexport.methods import all_methods
    from kvexport.ops.merge_cache import MergeCacheAttributes

    made, rng, capacity = all_methods()[method](), np.random.default_rng(seed), budget + MERGE_EVERY
    arrays = layer(batch, heads, heads, budget, MERGE_EVERY, len(made.statistics), "float16")
    state = {name: arrays[f"past_{name}"] for name in STATE}
    state["votes"][:] = 1.0
    state["score"] = rng.permuted(np.broadcast_to(np.arange(1, capacity + 1) / capacity, state["score"].shape), axis=-1).astype(np.float32)
    if not in_order:
        state["position"] = state["position"][:, :, ::-1].copy()
    return state, MergeCacheAttributes(made, budget, 4, budget // 2)


def bandwidth(target: Target) -> Figures:
    """Bytes per second, read and written, of a copy far larger than any cache: the floor of all that follows."""
    if target.on_host:
        return {"bytes per second": 1e10}
    import torch

    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    b = torch.empty_like(a)
    return {"bytes per second": 2 * a.numel() / statistics.median(target.seconds([lambda: b.copy_(a)]))}


def decode(target: Target) -> Figures:
    """Microseconds of a step at every shape, beside the time its bytes take to be copied and PyTorch's attention over the same cache."""
    copied, rows = bandwidth(target)["bytes per second"], []
    for batch, query_heads, heads, slots in DECODE[: target.scaled(len(DECODE), 1)]:
        slots, batch = target.scaled(slots, 64), target.scaled(batch, 1)
        arrays = layer(batch, query_heads, heads, slots, 1, 1, "float16")
        for kind in ("log_ema", "probability", "none"):
            nbytes = batch * heads * slots * (4 * SIZE + 8 + (8 if kind != "none" else 0))
            # Caches enough that none is still in a cache of the device when its turn comes again.
            copies = 1 if nbytes > 3e8 else target.scaled(max(2, int(3e8 / nbytes)), 2)
            steps = [Step(target, arrays, attributes_of(kind)) for _ in range(copies)]

            def reset(steps: list[Step] = steps) -> None:
                for step in steps:
                    step.reset()

            ours = target.seconds(list(steps), reset)
            peer = [] if target.on_host or kind != "log_ema" else target.seconds([torch_attention(step, slots) for step in steps])
            floor = nbytes / copied
            goal = floor / 0.8 if nbytes >= 64 << 20 else floor / 0.85 + 5e-6
            row = {"batch": batch, "query heads": query_heads, "heads": heads, "slots": slots, "statistic": kind, "bytes": nbytes}
            row |= {
                "us": statistics.median(ours) * 1e6,
                "floor us": floor * 1e6,
                "goal us": goal * 1e6,
                "met": statistics.median(ours) <= goal,
            }
            rows.append(
                row | {"torch us": statistics.median(peer) * 1e6 if peer else None, "share of copy": floor / statistics.median(ours)}
            )
            del steps
    return {"bytes per second": copied, "rows": rows}


def torch_attention(step: Step, slots: int) -> Callable[[], Any]:
    """PyTorch's own attention over a step's cache, without votes or scores."""
    from torch.nn.functional import scaled_dot_product_attention

    key, value = (step.held[f"past_{name}"][:, :, :slots].contiguous() for name in ("key", "value"))
    query = step.held["query"]
    return lambda: scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])


def prefill(target: Target) -> Figures:
    """TFLOP/s of a chunk against slots, beside PyTorch's attention over as many keys."""
    rows, chunk = [], target.scaled(CHUNK, 16)
    for batch, query_heads, heads, slots in ((1, 32, 8, 2048), (4, 32, 8, 2048), (1, 32, 32, 2048)):
        slots, query_heads, heads = target.scaled(slots, 64), target.scaled(query_heads, 4), target.scaled(heads, 2)
        for kind in ("none", "log_ema", "probability"):
            step = Step(target, layer(batch, query_heads, heads, slots, chunk, 1, "float16"), attributes_of(kind))
            seconds = statistics.median(target.seconds([step], step.reset))
            flops = 4 * batch * query_heads * SIZE * (chunk * slots + chunk * (chunk + 1) // 2)
            row = {"batch": batch, "query heads": query_heads, "heads": heads, "slots": slots, "chunk": chunk, "statistic": kind}
            row |= {"us": seconds * 1e6, "TFLOPs": flops / seconds / 1e12, "torch TFLOPs": None}
            if not target.on_host:
                peer = statistics.median(target.seconds([torch_attention(step, slots + chunk)]))
                row["torch TFLOPs"] = 4 * batch * query_heads * SIZE * chunk * (slots + chunk) / peer / 1e12
            rows.append(row)
    return {"rows": rows}


def merge(target: Target) -> Figures:
    """Microseconds of one merge of 32 slots, and what it adds to each of 32 decode steps."""
    rows = []
    for batch, heads, budget in ((1, 32, 1024), (8, 8, 4096), (32, 8, 1024))[: target.scaled(3, 1)]:
        budget, heads = target.scaled(budget, 128), target.scaled(heads, 2)
        step = Step(target, layer(batch, 4 * heads, heads, budget, 1, 1, "float16"), attributes_of("log_ema"))
        each = statistics.median(target.seconds([step], step.reset))
        for method in ("h2o", "keepkv", "ballot", "zeromerge", "kvslimmer"):
            seconds = merge_seconds(target, *merge_state(target, method, batch, heads, budget, 0))
            row = {"batch": batch, "heads": heads, "budget": budget, "method": method, "us": seconds * 1e6, "decode us": each * 1e6}
            rows.append(row | {"ratio to a step without": 1 + seconds / MERGE_EVERY / each})
    return {"rows": rows}


def merge_seconds(target: Target, arrays: dict[str, np.ndarray], attributes: Any) -> float:
    memory = target.caller.memory
    held, original = ({name: memory.put(x) for name, x in arrays.items()} for _ in range(2))
    call = merge_cache_call(attributes, "float16", arrays["key"].shape, SIZE, arrays["score"].shape[2])
    call.past = call.present = target.caller.state(held)

    def reset() -> None:
        for name, x in original.items():
            held[name][...] = x

    return statistics.median(target.seconds([lambda: target.caller.prepared("merge_cache", call)()], reset))


PARTS: dict[str, Callable[[Target], Figures]] = {
    "build": build,
    "bandwidth": bandwidth,
    "decode": decode,
    "prefill": prefill,
    "merge": merge,
}
