"""The parts of `gpu_check` that build and measure. Each takes a target and returns its figures, or raises an error."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from plugins.building import make, resources
from tests.conformance.cuda_library import (
    DEVICE,
    STATE,
    TYPES,
    cache_type_of,
    merge_cache_call,
    names_of,
    vote_attention_call,
)
from tests.conformance.quantized import BITS, stored
from tools.gpu_check import prebuilt
from tools.gpu_check.target import Figures, Row, Target

# Batch, query heads, KV heads, slots; head size 128, fp16. Llama-2-7B's layers, Llama-3-8B's, its 70B's, and a group of
# sixteen.
DECODE = [
    (1, 32, 32, 512),
    (8, 32, 32, 1024),
    (32, 32, 32, 1024),
    (1, 32, 8, 4096),
    (8, 32, 8, 4096),
    (32, 32, 8, 4096),
    (1, 32, 8, 16384),
]
DECODE += [(16, 64, 8, 4096), (16, 64, 4, 4096)]
SMALL_DECODE = [(1, 32, 8, 4096), (8, 32, 32, 1024), (32, 32, 8, 4096)]
SIZE, CHUNK, MERGE_EVERY = 128, 512, 32
SLACK = 512  # slots beyond the budget, as in the recipes: max(prefill_chunk, merge_every)
LARGE = 64 << 20  # bytes of a layer's cache from which the goal is a share of the bandwidth


def build(target: Target) -> Figures:
    """Build the library and return the compiler's report on every kernel.

    With the compiler of the recorded resources no kernel may spill registers. Another compiler allocates registers
    differently, so its spills are only a warning.
    """
    if target.on_host:
        return {"library": make.build("cuda-host").name}
    import torch

    major, minor = torch.cuda.get_device_capability()
    capability = f"{major}{minor}"
    figures = prebuilt.take(capability, DEVICE)
    if figures is None:
        objects, report = make.compile_kernels([capability])
        make.link_device("cuda", objects, [capability], DEVICE)
        figures = {"compiler": resources.compiler_version(), "kernels": report}
    spilling = [name for name, numbers in figures["kernels"].items() if numbers["spills"]]
    if spilling and figures["compiler"] != json.loads(resources.RECORD.read_text())["compiler"]:
        figures["warning"] = f"with nvcc {figures['compiler']} registers spill in {', '.join(spilling)}"
    else:
        assert not spilling, f"registers spill in {', '.join(spilling)}"
    return {"library": DEVICE.name, **figures}


INPUTS = ("query", "key", "value", "position", "query_length", *(f"past_{name}" for name in STATE))


def attributes_of(kind: str) -> Any:
    """Return the attributes of VoteAttention with statistics of one kind: log_ema, probability, none or both."""
    from kvexport.methods.slots import Statistic
    from kvexport.ops.vote_attention import VoteAttentionAttributes

    kinds = {
        "log_ema": (Statistic("log_ema", 0.9),),
        "probability": (Statistic("probability"),),
        "none": (Statistic(),),
    }
    kinds["both"] = (Statistic("probability", 0.98), Statistic("log_ema", 0.95))
    return VoteAttentionAttributes(SIZE**-0.5, 1.0, kinds[kind])


def layer(
    batch: int, query_heads: int, heads: int, slots: int, tokens: int, kept: int, dtype: str, size: int = SIZE
) -> dict[str, np.ndarray]:
    """Return a layer's inputs with `slots` used slots, and room for SLACK more or for as many `tokens`.

    Large tensors repeat their contents, on which no time depends. `dtype` is the type of the cache and of the queries;
    with a quantized cache queries are float16.
    """
    rng, cache_type = np.random.default_rng(0), dtype
    dtype = "float16" if cache_type in BITS else dtype
    capacity = slots + max(tokens, SLACK)
    shape = (batch, heads, capacity)

    def normal(*dims: int) -> np.ndarray:
        count = int(np.prod(dims))
        some = rng.normal(size=min(count, 1 << 20)).astype(dtype)
        return np.resize(some, count).reshape(dims)

    rows = min(int(np.prod(shape)), 1 << 13)
    # Keys near 64 centres, so that some of them merge.
    past = {"key": rng.normal(size=(64, size))[rng.integers(0, 64, rows)] + 0.3 * rng.normal(size=(rows, size))}
    past["value"] = rng.normal(size=(rows, size))
    if cache_type in BITS:
        for name, bits in zip(("key", "value"), BITS[cache_type], strict=True):
            past[name], past[f"{name}_scale"] = stored(past[name], bits)
    else:
        past = {name: x.astype(dtype) for name, x in past.items()}
    votes = np.ones(shape, np.float32)
    votes[:, :, slots:] = 0
    return {
        "query": normal(batch, query_heads, tokens, size),
        "key": normal(batch, heads, tokens, size),
        "value": normal(batch, heads, tokens, size),
        "position": np.broadcast_to(slots + np.arange(tokens), (batch, tokens)).copy(),
        "query_length": np.full((batch, 1), tokens),
        **{f"past_{name}": np.resize(x, (*shape, *x.shape[1:])) for name, x in past.items()},
        "past_votes": votes,
        "past_score": rng.gamma(1.0, size=(batch, heads, kept, capacity)).astype(np.float32),
        "past_position": np.broadcast_to(np.arange(capacity, dtype=np.int32), shape).copy(),
    }


class Step:
    """One layer on the target, with its call prepared in place."""

    def __init__(self, target: Target, arrays: dict[str, np.ndarray], attributes: Any) -> None:
        memory = target.caller.memory
        self.memory, self.target = memory, target
        self.held = {name: memory.put(x) for name, x in arrays.items()}
        self.votes = memory.put(arrays["past_votes"])
        query, key = arrays["query"], arrays["past_key"]
        self.output = memory.put(np.zeros((*query.shape[:3], arrays["value"].shape[3]), query.dtype))
        shape = (*key.shape[:3], query.shape[3])
        call = vote_attention_call(attributes, query.dtype.name, query.shape, shape, arrays["value"].shape[3])
        call.cache_type = TYPES[cache_type_of(key, arrays["past_value"])]
        for name in INPUTS[:5]:
            setattr(call, name, memory.address(self.held[name]))
        past = {name: self.held[f"past_{name}"] for name in names_of(key)}
        target.caller.bind(call, past, past)
        call.output = memory.address(self.output)
        self.call = call

    def __call__(self) -> None:
        self.target.caller.prepared("vote_attention", self.call)()

    def reset(self) -> None:
        """Remove the token that the last step appended."""
        if self.target.on_host:
            self.held["past_votes"][...] = self.votes
        else:
            self.held["past_votes"].copy_(self.votes)


def merge_state(
    target: Target, method: str, batch: int, heads: int, budget: int, seed: int, *, in_order: bool = True
) -> tuple[dict[str, np.ndarray], Any]:
    """Return a cache that is MERGE_EVERY slots over its budget, and the attributes of its merge."""
    from kvexport.methods import all_methods
    from kvexport.ops.merge_cache import MergeCacheAttributes

    compression, rng = all_methods()[method](), np.random.default_rng(seed)
    arrays = layer(batch, heads, heads, budget + MERGE_EVERY, 1, len(compression.statistics), "float16")
    state = {name: arrays[f"past_{name}"] for name in STATE}
    capacity = state["votes"].shape[2]
    state["score"] = rng.permuted(
        np.broadcast_to(np.arange(1, capacity + 1) / capacity, state["score"].shape), axis=-1
    ).astype(np.float32)
    if not in_order:
        state["position"] = state["position"][:, :, ::-1].copy()
    return state, MergeCacheAttributes(compression, budget, 4, budget // 2)


def bandwidth(target: Target) -> Figures:
    """Measure the bytes per second, read and written, of a copy far larger than any cache: the floor of others."""
    if target.on_host:
        return {"bytes per second": 1e10}
    import torch

    a = torch.empty(target.scaled(1 << 30, 1 << 20), dtype=torch.uint8, device="cuda").fill_(1)
    b = torch.empty_like(a)
    return {"bytes per second": 2 * a.numel() / statistics.median(target.seconds([lambda: b.copy_(a)]))}


def decode(target: Target) -> Figures:
    """Measure the microseconds of a step at every shape.

    Each row also has the time in which its bytes are copied, and PyTorch's attention over the same cache.
    """
    figures: Figures = {"bytes per second": bandwidth(target)["bytes per second"], "peers not measured": {}}

    def measure(case: tuple[str, tuple[int, ...]]) -> list[Row]:
        kinds = ("log_ema", "probability", "none") if case[0] == "float16" else ("log_ema",)
        return [decode_row(target, *case, kind, figures) for kind in kinds]

    cases = [("float16", shape) for shape in DECODE[: target.scaled(len(DECODE), 1)]]
    small = SMALL_DECODE[: target.scaled(len(SMALL_DECODE), 1)]
    return target.rows([*cases, *((dtype, shape) for dtype in BITS for shape in small)], figures, measure)


def decode_row(target: Target, dtype: str, case: tuple[int, ...], kind: str, figures: Figures) -> Row:
    """Return the row of a type of cache, shape and statistic; for float16 with PyTorch's and FlashInfer's attention."""
    batch, query_heads, heads, slots = case
    slots, batch = target.scaled(slots, 64), target.scaled(batch, 1)
    row_bytes = 8 + sum(BITS[dtype]) * SIZE // 8 if dtype in BITS else 4 * SIZE
    nbytes = batch * heads * slots * (row_bytes + 8 + (8 if kind != "none" else 0))
    # Enough caches that none is still in a cache of the device when its turn comes again.
    copies = 1 if nbytes > 3e8 else target.scaled(max(2, int(3e8 / nbytes)), 2)
    arrays = layer(batch, query_heads, heads, slots, 1, 1, dtype)
    steps = [Step(target, arrays, attributes_of(kind)) for _ in range(copies)]

    def reset() -> None:
        for step in steps:
            step.reset()

    ours = statistics.median(target.seconds(list(steps), reset))
    floor = nbytes / figures["bytes per second"]
    goal = floor / 0.8 if nbytes >= LARGE else floor / 0.85 + 5e-6
    row: Row = {"cache": dtype, "batch": batch, "query heads": query_heads, "heads": heads, "slots": slots}
    row |= {
        "statistic": kind,
        "bytes": nbytes,
        "us": ours * 1e6,
        "floor us": floor * 1e6,
        "goal us": goal * 1e6,
        "met": ours <= goal,
    }
    row |= {"share of copy": floor / ours} | {f"{name} us": None for name in PEERS}
    if kind != "log_ema" or dtype != "float16" or target.on_host:
        return row
    for name, peer in PEERS.items():
        try:
            row[f"{name} us"] = statistics.median(target.seconds([peer(step, slots) for step in steps])) * 1e6
        except Exception as error:
            figures["peers not measured"][name] = f"{type(error).__name__}: {error}"[:200]
    return row


def flash() -> Callable[..., Any]:
    """Return PyTorch's flash attention of query, key, value, or what PyTorch uses instead."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def attention(query: Any, key: Any, value: Any) -> Any:
        with sdpa_kernel(backends):
            return scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])

    return attention


def torch_attention(step: Step, slots: int) -> Callable[[], Any]:
    """Return PyTorch's own attention over a step's cache, without votes or scores."""
    key, value = (step.held[f"past_{name}"][:, :, :slots].contiguous() for name in ("key", "value"))
    query, attention = step.held["query"], flash()
    return lambda: attention(query, key, value)


def flashinfer_attention(step: Step, slots: int) -> Callable[[], Any]:
    """Return FlashInfer's attention with one page per sequence."""
    import flashinfer
    import torch

    key, value = (step.held[f"past_{name}"][:, :, :slots].contiguous() for name in ("key", "value"))
    query = step.held["query"][:, :, 0].contiguous()
    (batch, query_heads, size), heads = query.shape, key.shape[1]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=query_heads > heads)
    pages = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), slots, dtype=torch.int32, device="cuda")
    wrapper.plan(
        pages, pages[:-1], last, query_heads, heads, size, slots, q_data_type=query.dtype, kv_data_type=key.dtype
    )
    return lambda: wrapper.run(query, (key, value))


PEERS = {"torch": torch_attention, "flashinfer": flashinfer_attention}


def prefill(target: Target) -> Figures:
    """Measure the TFLOP/s of a chunk against slots, and of PyTorch's attention over as many keys."""
    shapes = ((1, 32, 8, 2048), (4, 32, 8, 2048), (1, 32, 32, 2048))
    cases = [(*shape, kind) for shape in shapes for kind in ("log_ema", "probability", "none")]
    return target.rows(cases, {}, lambda case: prefill_row(target, *case))


def prefill_row(target: Target, batch: int, query_heads: int, heads: int, slots: int, kind: str) -> Row:
    chunk = target.scaled(CHUNK, 16)
    slots, query_heads, heads = target.scaled(slots, 64), target.scaled(query_heads, 4), target.scaled(heads, 2)
    step = Step(target, layer(batch, query_heads, heads, slots, chunk, 1, "float16"), attributes_of(kind))
    seconds = statistics.median(target.seconds([step], step.reset))
    flops = 4 * batch * query_heads * SIZE * (chunk * slots + chunk * (chunk + 1) // 2)
    row: Row = {"batch": batch, "query heads": query_heads, "heads": heads, "slots": slots, "chunk": chunk}
    row |= {"statistic": kind, "us": seconds * 1e6, "TFLOPs": flops / seconds / 1e12}
    row |= {"torch TFLOPs": None, "share of torch": None}
    if not target.on_host:
        peer = statistics.median(target.seconds([torch_attention(step, slots + chunk)]))
        theirs = 4 * batch * query_heads * SIZE * chunk * (slots + chunk) / peer / 1e12
        row |= {"torch TFLOPs": theirs, "share of torch": row["TFLOPs"] / theirs}
    return row


def merge(target: Target) -> Figures:
    """Measure the microseconds of one merge of 32 slots, and its share in each of 32 decode steps."""
    shapes = ((1, 32, 1024), (32, 8, 1024), (8, 8, 4096))[: target.scaled(3, 1)]
    return target.rows(shapes, {}, lambda shape: merge_rows(target, *shape))


def merge_rows(target: Target, batch: int, heads: int, budget: int) -> list[Row]:
    budget, heads = target.scaled(budget, 128), target.scaled(heads, 2)
    step = Step(target, layer(batch, 4 * heads, heads, budget, 1, 1, "float16"), attributes_of("log_ema"))
    each = statistics.median(target.seconds([step], step.reset))
    rows = []
    for method in ("keepkv", "ballot", "h2o", "zeromerge", "kvslimmer"):
        seconds = merge_seconds(target, *merge_state(target, method, batch, heads, budget, 0))
        row: Row = {"batch": batch, "heads": heads, "budget": budget, "slack": SLACK, "method": method}
        row |= {"us": seconds * 1e6, "decode us": each * 1e6}
        rows.append(row | {"ratio to a step without": 1 + seconds / MERGE_EVERY / each})
    return rows


def merge_seconds(target: Target, arrays: dict[str, np.ndarray], attributes: Any) -> float:
    """Return the median seconds of a merge of this state, which is restored before every run."""
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
