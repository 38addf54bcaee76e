"""The CUDA kernels through their C ABI (plugins/cuda/kvexport_cuda.h), as two backends: on a GPU, and compiled for the
host.

Needs numpy alone; on a GPU PyTorch holds the memory. The libraries are the targets ``cuda``
and ``cuda-host`` of plugins/build.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.schema.state import STATE_NAMES as STATE
from plugins.building import make
from plugins.building.targets import TARGETS
from tests.support.paths import ROOT

Arrays = dict[str, np.ndarray]
HOST, DEVICE = (ROOT / TARGETS[name].output for name in ("cuda-host", "cuda"))
COUNTER_BYTES = 1 << 18
TYPES = {"float32": 0, "float16": 1, "uint16": 2}  # numpy has no bfloat16: its bits stand as uint16
KINDS = {"none": 0, "log_ema": 1, "probability": 2}
# The enumerations of plugins/abi/kvexport.h.
BY_POSITION, BY_SCORE, BY_AVERAGE, BY_POOLED, BY_MEAN = range(5)
DROP, ZIP, RUNNING_MEAN, PAIR = range(4)
COSINE, DOT, DISTANCE = range(3)


class State(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in STATE]


class Statistic(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("decay", ctypes.c_float),
        ("window", ctypes.c_int),
        ("recency_weight", ctypes.c_float),
    ]


def _fields(text: str) -> list[tuple[str, Any]]:
    """ "int: a b; float: c" as a structure's fields."""
    types = {
        "int": ctypes.c_int,
        "float": ctypes.c_float,
        "pointer": ctypes.c_void_p,
        "state": State,
        "statistics": Statistic * 8,
    }
    groups = (part.split(":") for part in text.split(";"))
    return [(name, types[kind.strip()]) for kind, names in groups for name in names.split()]


class VoteAttention(ctypes.Structure):
    _fields_ = _fields(
        "int: cache_type batch query_heads heads tokens capacity key_size value_size statistics;"
        "float: scale vote_exponent softcap;"
        "int: sliding_window; statistics: statistic; int: query_type;"
        "pointer: query key value position query_length sink_logits; state: past present;"
        "pointer: output"
    )


class MergePolicy(ctypes.Structure):
    _fields_ = _fields(
        "int: compresses importance; float: decay; int: pooled merge_first pool by_error; float: attention;"
        "int: voted_last merging measure; float: threshold;"
        "int: recent_receives zip; float: key_factor_max votes_max weigh_decay residual; int: mean_adds weigh; "
        "float: tau;"
        "int: rotary_planes rotary_interleaved; pointer: inverse_frequencies; statistics: statistic"
    )


class MergeCache(ctypes.Structure):
    _fields_ = [
        *_fields(
            "int: cache_type batch heads capacity key_size value_size statistics budget sinks recent sliding_window"
        ),
        ("policy", MergePolicy),
        *_fields("state: past present"),
    ]


class Where(ctypes.Structure):
    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("counters", ctypes.c_void_p),
    ]


@cache
def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for operator, call in (("vote_attention", VoteAttention), ("merge_cache", MergeCache)):
        function, workspace = getattr(library, f"kv_cuda_{operator}"), getattr(library, f"kv_cuda_{operator}_workspace")
        function.restype = workspace.restype = library.kv_cuda_target.restype = ctypes.c_char_p
        function.argtypes = [ctypes.POINTER(call), ctypes.POINTER(Where)]
        workspace.argtypes = [ctypes.POINTER(call), ctypes.POINTER(ctypes.c_size_t)]
    return library


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even, as uint16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def float32_of(bits: np.ndarray) -> np.ndarray:
    """What the bits of a bfloat16 stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class HostMemory:
    """Arrays that the kernels compiled for the host can be called with."""

    stream = 0

    def put(self, x: np.ndarray) -> np.ndarray:
        """A copy, aligned to 64 bytes as device memory would be."""
        buffer = self.bytes(x.nbytes, 0)
        copy = buffer[: x.nbytes].view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy

    def bytes(self, size: int, zeros: int) -> np.ndarray:
        """`size` bytes, the first `zeros` of them zero and the others not, aligned to 256 bytes."""
        raw = np.full(size + 256, 0xFF, np.uint8)
        start = -raw.ctypes.data % 256
        raw[start : start + zeros] = 0
        return raw[start : start + size]

    def address(self, x: np.ndarray) -> int:
        return x.ctypes.data

    def get(self, x: np.ndarray) -> np.ndarray:
        return x.copy()


class DeviceMemory:
    """The same on a GPU, in PyTorch's hands."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.stream = torch.cuda.current_stream().cuda_stream

    def put(self, x: np.ndarray) -> Any:
        """A copy on the device; the bits of bfloat16 as int16, which every PyTorch has."""
        return self.torch.from_numpy(np.ascontiguousarray(x.view(np.int16) if x.dtype == np.uint16 else x)).cuda()

    def bytes(self, size: int, zeros: int) -> Any:
        made = self.torch.full((max(size, 1),), 0xFF, dtype=self.torch.uint8, device="cuda")
        made[:zeros] = 0
        return made

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def get(self, x: Any) -> np.ndarray:
        return x.cpu().numpy()


class Caller:
    """One library with one kind of memory, and a workspace that grows."""

    def __init__(self, library: ctypes.CDLL, memory: Any) -> None:
        self.library, self.memory = library, memory
        self.workspace = memory.bytes(COUNTER_BYTES, COUNTER_BYTES)
        self.size = COUNTER_BYTES

    def prepared(self, operator: str, call: Any) -> Callable[[], None]:
        """A function that enqueues the call; RuntimeError says what the library refuses."""
        needed = ctypes.c_size_t()
        self._check(getattr(self.library, f"kv_cuda_{operator}_workspace")(call, needed))
        if needed.value > self.size:
            self.workspace, self.size = self.memory.bytes(needed.value, COUNTER_BYTES), needed.value
        where = Where(self.memory.stream, self.memory.address(self.workspace), self.size)
        function = getattr(self.library, f"kv_cuda_{operator}")
        return lambda: self._check(function(call, where))

    def _run(self, operator: str, call: Any) -> None:
        """With rubbish in the workspace, so that nothing can rest on what an earlier call left there."""
        enqueue = self.prepared(operator, call)
        self.workspace[COUNTER_BYTES:] = 0xFF
        enqueue()

    def _check(self, problem: bytes | None) -> None:
        if problem:
            raise RuntimeError(f"kvexport: {problem.decode()}")

    def state(self, arrays: dict[str, Any]) -> State:
        return State(*(self.memory.address(arrays[name]) for name in STATE))

    def vote_attention(self, inputs: Arrays, attributes: Any, *, in_place: bool = True) -> Arrays:
        put = self.memory.put
        held = {name: put(x) for name, x in inputs.items()}
        past = {name: held[f"past_{name}"] for name in STATE}
        present = past if in_place else {name: put(np.full_like(inputs[f"past_{name}"], 77)) for name in STATE}
        query, key = inputs["query"], inputs["past_key"]
        output = put(np.full((*query.shape[:3], inputs["value"].shape[3]), 77, query.dtype))
        call = vote_attention_call(attributes, query.dtype.name, query.shape, key.shape, inputs["value"].shape[3])
        for name in ("query", "key", "value", "position", "query_length", "sink_logits"):
            setattr(call, name, self.memory.address(held[name]) if name in held else None)
        call.past, call.present, call.output = self.state(past), self.state(present), self.memory.address(output)
        self._run("vote_attention", call)
        return {"output": self.memory.get(output)} | {
            f"present_{name}": self.memory.get(present[name]) for name in STATE
        }

    def merge_cache(self, state: Arrays, attributes: Any, *, in_place: bool = True) -> Arrays:
        put = self.memory.put
        past = {name: put(x) for name, x in state.items()}
        present = past if in_place else {name: put(np.full_like(state[name], 77)) for name in STATE}
        call = merge_cache_call(
            attributes, state["key"].dtype.name, state["key"].shape, state["value"].shape[3], state["score"].shape[2]
        )
        frequencies = put(np.array(attributes.rotary.inverse_frequencies or (0.0,), np.float32))
        call.policy.inverse_frequencies = self.memory.address(frequencies)
        call.past, call.present = self.state(past), self.state(present)
        self._run("merge_cache", call)
        return {f"present_{name}": self.memory.get(present[name]) for name in STATE}


def vote_attention_call(
    attributes: Any, dtype: str, query: tuple[int, ...], key: tuple[int, ...], value_size: int
) -> VoteAttention:
    """A call without its pointers. query [B, Hq, T, D]; key [B, H, C, D]."""
    sizes = (query[0], query[1], key[1], query[2], key[2], key[3], value_size, len(attributes.statistics))
    call = VoteAttention(TYPES[dtype], *sizes)
    call.scale, call.vote_exponent, call.softcap = attributes.scale, attributes.vote_exponent, attributes.softcap
    call.sliding_window, call.query_type = attributes.sliding_window, TYPES[dtype]
    for k, s in enumerate(attributes.statistics):
        call.statistic[k] = Statistic(KINDS[s.kind], s.decay, s.window, s.recency_weight)
    return call


def merge_cache_call(attributes: Any, dtype: str, key: tuple[int, ...], value_size: int, statistics: int) -> MergeCache:
    """A call without its pointers. key [B, H, C, D]."""
    call = MergeCache(TYPES[dtype], key[0], key[1], key[2], key[3], value_size, statistics)
    call.budget, call.sinks, call.recent, call.sliding_window = (
        attributes.budget,
        attributes.sinks,
        attributes.recent,
        attributes.sliding_window,
    )
    call.policy = policy_of(attributes.method)
    call.policy.rotary_planes = len(attributes.rotary.inverse_frequencies) if call.policy.merging == PAIR else 0
    call.policy.rotary_interleaved = attributes.rotary.interleaved
    return call


def lacks(method: Any) -> str | None:
    """Why there is no kernel for a method."""
    if method.name not in (
        "full",
        "streaming",
        "h2o",
        "pyramidinfer",
        "snapkv",
        "pyramidkv",
        "keepkv",
        "ballot",
        "zeromerge",
        "kvslimmer",
        "asymkv",
    ):
        return f"the method {method.name} has no native kernel"
    return "share_pairs has no native kernel" if getattr(method, "share_pairs", False) else None


def policy_of(method: Any) -> MergePolicy:
    """A method's parameters as the policy that the kernels run, as plugins/bindings/node/attributes.h
    reads them off a node."""
    p = MergePolicy(compresses=method.name != "full", threshold=-1e38, votes_max=getattr(method, "votes_max", math.inf))
    for k, s in enumerate(method.statistics):
        p.statistic[k].kind = KINDS[s.kind]
    selector = getattr(method, "selector", "own")
    if method.name in ("streaming", "full"):
        p.importance = BY_POSITION
    elif method.name in ("snapkv", "pyramidkv") or selector == "snapkv":
        p.importance, p.pooled = BY_POOLED, getattr(method, "pool", 5) if selector == "own" else 5
    elif method.name in ("keepkv", "ballot") and selector == "own":
        p.importance = BY_AVERAGE if method.name == "keepkv" else BY_MEAN
    else:
        p.importance = BY_SCORE
    if method.name in ("keepkv", "ballot"):
        p.merging, p.zip = ZIP, {"key": 0, "vote": 1, "mean": 2, "count": 2}[method.zip]
        p.decay = p.weigh_decay = method.decay
    if method.name == "keepkv":
        p.measure, p.threshold, p.key_factor_max = COSINE, method.threshold, method.key_factor_max
        p.merge_first, p.pool = method.order == "merge-first", method.pool
    elif method.name == "ballot":
        p.measure, p.recent_receives, p.mean_adds = DISTANCE, 1, selector == "own"
        p.merge_first = p.by_error = method.order == "least-error"
        p.pool, p.attention = method.pool, method.attention
    elif method.name == "zeromerge":
        p.merging, p.measure, p.voted_last, p.residual = RUNNING_MEAN, DOT, 1, method.residual
    elif method.name in ("kvslimmer", "asymkv"):
        p.merging, p.weigh = PAIR, method.name == "kvslimmer"
        p.tau = getattr(method, "tau", 0.0)
    return p


class CudaOnHost:
    """The kernels' own source compiled for the host: what runs is their indexing, masks and orders, not a GPU."""

    name = "cuda-on-host"

    def available(self) -> str | None:
        return None if make.is_current("cuda-host") else "the kernels are not compiled for the host: make cuda-host"

    @property
    def caller(self) -> Caller:
        return _host_caller()

    def vote_attention(self, inputs: Arrays, attributes: Any) -> Arrays:
        return self.caller.vote_attention(inputs, attributes)

    def lacks(self, attributes: Any) -> str | None:
        return lacks(attributes.method)

    def merge_cache(self, state: Arrays, attributes: Any) -> Arrays:
        return self.caller.merge_cache(state, attributes)


class Cuda(CudaOnHost):
    """The kernels on a GPU."""

    name = "cuda"

    def available(self) -> str | None:
        import torch

        if not torch.cuda.is_available():
            return "PyTorch finds no GPU"
        return None if make.is_current("cuda") else "the kernels are not compiled for this GPU: make gpu-check"

    @property
    def caller(self) -> Caller:
        return _device_caller()


@cache
def _host_caller() -> Caller:
    return Caller(load(HOST), HostMemory())


@cache
def _device_caller() -> Caller:
    return Caller(load(DEVICE), DeviceMemory())
