"""Kernels whose PTX lacks a barrier, a fence or a wait, and calls that run them."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvexport.methods import all_methods
from kvexport.methods.slots import Rotary, Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from plugins.building import make
from plugins.building.ptx import library
from tests.conformance.cuda_library import PtxCaller
from tests.conformance.quantized import small

Arrays = dict[str, np.ndarray]
KINDS = {
    "barrier": r"bar\.sync\s+0;",
    "fence": r"membar\.gl;",
    "wait": r"cp\.async\.wait_group\s+\d;",
    "commit": r"cp\.async\.commit_group;",
    "earlier": r"griddepcontrol\.wait;",
}
BOTH = (Statistic("probability", 0.98), Statistic("log_ema", 0.95))
MULTIPROCESSORS = 3  # so few that a split of `decode` has more blocks of slots than stages


def places(body: str, kind: str) -> list[tuple[int, int]]:
    """Return the positions of all instructions of a kind in a kernel's PTX."""
    return [match.span() for match in re.finditer(KINDS[kind], body)]


def without(kind: str, which: int | None = None, instead: str = "") -> Callable[[str], str]:
    """Return a function that replaces one instruction of a kind, or all of them, in PTX."""

    def alter(body: str) -> str:
        spans = places(body, kind)
        assert spans, f"there is no {kind}"
        for begin, end in reversed(spans if which is None else spans[which : which + 1]):
            body = body[:begin] + instead + body[end:]
        return body

    return alter


def writes_early(body: str) -> str:
    """Return PTX that stores to the kernel's first address argument before it waits for earlier launches.

    Arguments that the kernel finds by a register, as those of an entry of a table, are not at a fixed place.
    """
    address = re.search(r"ld\.param\.u64\s+%\w+,\s*(\[[^%\]]+\]);", body)
    assert address, "the kernel has no address argument"
    store = f"{{ .reg .b64 %first; ld.param.u64 %first, {address[1]}; st.global.u32 [%first], 0; }}\n"
    return without("earlier", 0, f"{store}griddepcontrol.wait;")(body)


def attend(caller: PtxCaller, group: int, cache_type: str = "", tokens: int = 1, dtype: str = "float16") -> Arrays:
    rng, heads, capacity, size = np.random.default_rng(3), 2, 400, 64
    shape = (2, heads, capacity)
    x = {"query": rng.normal(size=(2, group * heads, tokens, size)).astype(dtype)}
    x |= {name: rng.normal(size=(2, heads, tokens, size)).astype(dtype) for name in ("key", "value")}
    x |= {f"past_{name}": rng.normal(size=(*shape, size)).astype(dtype) for name in ("key", "value")}
    used = np.array([[[capacity - tokens - 9]], [[150]]])
    x = small(x, cache_type, "past_") if cache_type else x
    x["past_votes"] = np.broadcast_to((np.arange(capacity) < used).astype(np.float32), shape).copy()
    x["past_score"] = rng.gamma(1.0, size=(2, heads, 2, capacity)).astype(np.float32)
    x["past_position"] = np.broadcast_to(np.arange(capacity, dtype=np.int32), shape).copy()
    x |= {"position": used[:, :, 0] + np.arange(tokens), "query_length": np.full((2, 1), tokens)}
    return caller.vote_attention(x, VoteAttentionAttributes(0.1, 1.0, BOTH))


def merge(caller: PtxCaller, method: str, *, slots: int = 200, in_order: bool = True, dtype: str = "float16") -> Arrays:
    method_object, rng, shape, size = all_methods()[method](), np.random.default_rng(4), (1, 2, slots), 32
    x = {name: rng.normal(size=(*shape, size)).astype(dtype) for name in ("key", "value")}
    x["votes"] = np.ones(shape, np.float32)
    x["score"] = rng.gamma(1.0, size=(1, 2, len(method_object.statistics), slots)).astype(np.float32)
    x["position"] = np.broadcast_to(np.arange(slots, dtype=np.int32)[:: 1 if in_order else -1], shape).copy()
    rotary = Rotary(tuple(float(2.0**-i) for i in range(8))) if method_object.rotary else Rotary()
    return caller.merge_cache(x, MergeCacheAttributes(method_object, slots - 40, 4, 60, 0, rotary))


CALLS: dict[str, Callable[[PtxCaller], Arrays]] = {
    "Decode<float, 4>": lambda caller: attend(caller, 3, dtype="float32"),
    "DecodeMma<Half, 128>": lambda caller: attend(caller, 5),
    "DecodeQuantized<8, 4, 128>": lambda caller: attend(caller, 2, "k8v4"),
    "PrefillMma<Half, 64>": lambda caller: attend(caller, 2, tokens=70),
    "Prefill<float, 1>": lambda caller: attend(caller, 1, tokens=40, dtype="float32"),
    "NearestMma<Half, true, 2>": lambda caller: merge(caller, "ballot"),
    "Nearest<float, false>": lambda caller: merge(caller, "keepkv", dtype="float32"),
    "MergeRows<Half>": lambda caller: merge(caller, "ballot"),
    "Order": lambda caller: merge(caller, "ballot"),
    "Place": lambda caller: merge(caller, "ballot", slots=300, in_order=False),
    "Rank": lambda caller: merge(caller, "h2o"),
}


def found(program: str, alter: Callable[[str], str], path: Path, right: Arrays | None = None) -> str:
    return faults(library.mutant(make.build("cuda-ptx"), program, alter, path), program, right)


def faults(path: Path, call: str, right: Arrays | None = None) -> str:
    """Run one of CALLS with a library of mutants, and return the report of its fault, "other results", or ""."""
    caller = PtxCaller(path)
    for order, late in ((2, True), (0, False), (1, True)):
        caller.set_order(order, late=late, multiprocessors=MULTIPROCESSORS)
        try:
            actual = CALLS[call](caller)
        except (AssertionError, RuntimeError) as fault:
            return str(fault).splitlines()[0]
        if right is not None and any(actual[name].tobytes() != right[name].tobytes() for name in right):
            return "other results"
    return ""
