"""Calls of the CUDA kernels through their C ABI (plugins/cuda/kvexport_cuda.h), on a GPU and compiled for the host.

They need only numpy; on a GPU PyTorch allocates the memory. The libraries are the targets ``cuda`` and ``cuda-host`` of
plugins/build.py.
"""

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.schema.operators import VOTE_ATTENTION
from kvexport.schema.policy import POLICY
from kvexport.schema.state import SCALES
from kvexport.schema.state import STATE_NAMES as STATE
from plugins.building import make
from plugins.building.targets import TARGETS
from tests.conformance.layout import OfHeads
from tests.support.paths import ROOT
from tools.schema import number, scalars, structs

Arrays = dict[str, np.ndarray]
HOST, DEVICE, PTX = (ROOT / TARGETS[name].output for name in ("cuda-host", "cuda", "cuda-ptx"))
OTHER_LIBRARY = "KVEXPORT_CUDA_HOST"  # the path of a library to test instead of HOST
EVERY_PTX = "KVEXPORT_EVERY_PTX"  # all kernels and all cases of the backend cuda-ptx
COUNTER_BYTES = 1 << 18
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int4": 3, "k8v4": 4}  # the last three are of quantized caches
SMALL_TYPES = {("int8", "int8"): "int8", ("uint8", "uint8"): "int4", ("int8", "uint8"): "k8v4"}


def _structures() -> dict[str, Any]:
    """Return the structs of plugins/abi/kvexport.h, from the schema from which that file is generated."""
    types: dict[str, Any] = {"int": ctypes.c_int, "float": ctypes.c_float}
    for name, fields in structs().items():
        kinds = [(field, types.get(field.type, ctypes.c_void_p)) for field in fields]
        members = [(field.name, kind * field.count if field.count else kind) for field, kind in kinds]
        types[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    return types


STRUCTURES = _structures()
State, Statistic = STRUCTURES["KvState"], STRUCTURES["KvStatistic"]
Scales, SCALE_NAMES = STRUCTURES["KvScales"], tuple(tensor.name for tensor in SCALES)
VoteAttention, MergeCache = STRUCTURES["KvVoteAttention"], STRUCTURES["KvMergeCache"]


OPERATORS = {"vote_attention": VoteAttention, "merge_cache": MergeCache}


class Where(ctypes.Structure):
    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("counters", ctypes.c_void_p),
        ("begin", ctypes.c_int),
    ]


IN_ORDER, EARLY = range(2)  # when launches begin, as in plugins/cuda/kvexport_cuda.h


def cache_type_of(key: np.ndarray, value: np.ndarray) -> str:
    return SMALL_TYPES.get((key.dtype.name, value.dtype.name), key.dtype.name)


def names_of(key: np.ndarray) -> tuple[str, ...]:
    """Return the names of the state tensors of a cache with keys of this dtype."""
    return (*STATE, *SCALE_NAMES) if key.dtype in (np.int8, np.uint8) else STATE


@cache
def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.kv_cuda_target.restype = ctypes.c_char_p
    for operator, call in OPERATORS.items():
        function = getattr(library, f"kv_cuda_{operator}")
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.POINTER(call), ctypes.POINTER(Where)]
        workspace = getattr(library, f"kv_cuda_{operator}_workspace")
        workspace.restype = ctypes.c_char_p
        workspace.argtypes = [ctypes.POINTER(call), ctypes.POINTER(ctypes.c_size_t)]
    return library


class HostMemory:
    stream = 0

    def put(self, x: np.ndarray) -> np.ndarray:
        """Return a copy, aligned to 64 bytes as device memory is."""
        buffer = self.bytes(x.nbytes, 0)
        copy = buffer[: x.nbytes].view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy

    def bytes(self, size: int, zeros: int) -> np.ndarray:
        raw = np.full(size + 256, 0xFF, np.uint8)
        start = -raw.ctypes.data % 256
        raw[start : start + zeros] = 0
        return raw[start : start + size]

    def address(self, x: np.ndarray) -> int:
        return x.ctypes.data

    def get(self, x: np.ndarray) -> np.ndarray:
        return x.copy()


class DeviceMemory:
    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.stream = torch.cuda.current_stream().cuda_stream

    def put(self, x: np.ndarray) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(x)).cuda()

    def bytes(self, size: int, zeros: int) -> Any:
        buffer = self.torch.full((max(size, 1),), 0xFF, dtype=self.torch.uint8, device="cuda")
        buffer[:zeros] = 0
        return buffer

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def get(self, x: Any) -> np.ndarray:
        return x.cpu().numpy()


class Caller(OfHeads):
    """A library with its kind of memory, and a workspace that grows. `begin` is KvCuda.begin: when launches begin."""

    begin = IN_ORDER

    def __init__(self, library: ctypes.CDLL, memory: Any) -> None:
        self.library, self.memory = library, memory
        self.workspace = memory.bytes(COUNTER_BYTES, COUNTER_BYTES)
        self.size = COUNTER_BYTES

    def prepared(self, operator: str, *call: Any) -> Callable[[], None]:
        """Return a function that enqueues the call and raises RuntimeError if the library refuses it."""
        needed = ctypes.c_size_t()
        self._check(getattr(self.library, f"kv_cuda_{operator}_workspace")(*call, ctypes.byref(needed)))
        if needed.value > self.size:
            self.workspace, self.size = self.memory.bytes(needed.value, COUNTER_BYTES), needed.value
        where = Where(self.memory.stream, self.memory.address(self.workspace), self.size, None, self.begin)
        function = getattr(self.library, f"kv_cuda_{operator}")
        return lambda: self._check(function(*call, ctypes.byref(where)))

    def _run(self, operator: str, *call: Any) -> None:
        """Run a call whose workspace is filled with 0xFF, so that no result depends on an earlier call."""
        enqueue = self.prepared(operator, *call)
        self.workspace[COUNTER_BYTES:] = 0xFF
        enqueue()

    def _check(self, problem: bytes | None) -> None:
        if problem:
            raise RuntimeError(f"kvexport: {problem.decode()}")

    def state(self, arrays: dict[str, Any]) -> Any:
        return State(*(self.memory.address(arrays[name]) for name in STATE))

    def bind(self, call: Any, past: dict[str, Any], present: dict[str, Any]) -> None:
        """Set the state of a call, and the scales of a quantized cache."""
        call.past, call.present = self.state(past), self.state(present)
        if SCALE_NAMES[0] in past:
            for where, held in (("past_scales", past), ("present_scales", present)):
                setattr(call, where, Scales(*(self.memory.address(held[name]) for name in SCALE_NAMES)))

    def layer_vote_attention(
        self, inputs: Arrays, attributes: Any, capacity: Sequence[int], *, in_place: bool = True
    ) -> Arrays:
        put = self.memory.put
        held = {name: put(x) for name, x in inputs.items()}
        key, value = inputs["past_key"], inputs["past_value"]
        names = names_of(key)
        past = {name: held[f"past_{name}"] for name in names}
        present = past if in_place else {name: put(np.full_like(inputs[f"past_{name}"], 77)) for name in names}
        query, value_size = inputs["query"], inputs["value"].shape[3]
        output = put(np.full((*query.shape[:3], value_size), 77, query.dtype))
        shape = (len(key), len(capacity), max(capacity), query.shape[3])
        call = vote_attention_call(attributes, query.dtype.name, query.shape, shape, value_size, capacity)
        call.cache_type = TYPES[cache_type_of(key, value)]
        for name in ("query", "key", "value", "position", "query_length", "sink_logits"):
            setattr(call, name, self.memory.address(held[name]) if name in held else None)
        self.bind(call, past, present)
        call.output = self.memory.address(output)
        self._run("vote_attention", call)
        return {"output": self.memory.get(output)} | {
            f"present_{name}": self.memory.get(present[name]) for name in names
        }

    def layer_merge_cache(
        self, state: Arrays, attributes: Sequence[Any], capacity: Sequence[int], *, in_place: bool = True
    ) -> Arrays:
        put = self.memory.put
        past = {name: put(x) for name, x in state.items()}
        present = past if in_place else {name: put(np.full_like(state[name], 77)) for name in STATE}
        key, value_size, statistics = state["key"], state["value"].shape[2], state["score"].shape[1]
        shape = (len(key), len(capacity), max(capacity), key.shape[2])
        call = merge_cache_call(attributes, key.dtype.name, shape, value_size, statistics, capacity)
        frequencies = self.frequencies(attributes[0])
        call.inverse_frequencies = self.memory.address(frequencies)
        call.past, call.present = self.state(past), self.state(present)
        self._run("merge_cache", call)
        return {f"present_{name}": self.memory.get(present[name]) for name in STATE}

    def frequencies(self, attributes: Any) -> Any:
        """Return a copy of the inverse frequencies of a merge's rotary embedding."""
        return self.memory.put(np.array(attributes.rotary.inverse_frequencies or (0.0,), np.float32))


def host_list(call: Any, name: str, numbers: Sequence[int]) -> None:
    """Set a member of a call that is a list in the host's memory. The call keeps the memory alive."""
    memory = (ctypes.c_int * len(numbers))(*numbers)
    setattr(call, f"_{name}", memory)
    setattr(call, name, ctypes.addressof(memory))


def vote_attention_call(
    attributes: Any,
    dtype: str,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value_size: int,
    capacity: Sequence[int] | None = None,
) -> Any:
    batch, query_heads, tokens, _ = query
    capacity = capacity or [key[2]] * key[1]
    sizes = {"heads": key[1], "slots": sum(capacity), "key_size": key[3], "value_size": value_size}
    call = VoteAttention(
        query_type=TYPES[dtype], cache_type=TYPES[dtype], batch=batch, query_heads=query_heads, tokens=tokens, **sizes
    )
    host_list(call, "capacity", capacity)
    call.statistics = len(attributes.statistics)
    for attribute in scalars(VOTE_ATTENTION):
        setattr(call, attribute.name, getattr(attributes, attribute.name))
    for k, s in enumerate(attributes.statistics):
        call.statistic[k] = Statistic(number("statistic", s.kind), s.decay, s.window, s.recency_weight)
    return call


def merge_cache_call(
    attributes: Any,
    dtype: str,
    key: tuple[int, ...],
    value_size: int,
    statistics: int,
    capacity: Sequence[int] | None = None,
) -> Any:
    batch, heads, slots, key_size = key
    every = attributes if isinstance(attributes, Sequence) else [attributes] * heads
    first, capacity = every[0], capacity or [slots] * heads
    method, rotary = first.method, first.rotary
    call = MergeCache(cache_type=TYPES[dtype], batch=batch, heads=heads, slots=sum(capacity), key_size=key_size)
    call.value_size, call.statistics = value_size, statistics
    host_list(call, "capacity", capacity)
    for name in ("budget", "recent"):
        host_list(call, name, [getattr(own, name) for own in every])
    for name in ("sinks", "sliding_window"):
        setattr(call, name, getattr(first, name))
    call.compresses, call.recent_receives = method.compresses, method.recent_receives
    for k, s in enumerate(method.statistics):
        call.statistic_kind[k] = number("statistic", s.kind)
    policy = first.policy
    for attribute in POLICY:
        value = getattr(policy, attribute.name)
        setattr(call.policy, attribute.name, number(attribute.name, value) if attribute.kind == "word" else value)
    call.rotary_planes, call.rotary_interleaved = len(rotary.inverse_frequencies), rotary.interleaved
    call.cache_positions = rotary.cache_positions
    return call


def checked_launches(library: ctypes.CDLL, operator: str, *call: Any) -> list[tuple[str, int]]:
    """Return the program, without its types, and the number of blocks of every launch of a call that is not run."""
    ask = getattr(library, f"kv_cuda_{operator}_problem")
    ask.restype = library.kv_host_checked.restype = ctypes.c_char_p
    if problem := ask(*call):
        raise RuntimeError(f"kvexport: {problem.decode()}")
    launches = []
    for line in library.kv_host_checked().decode().splitlines():
        # Compilers write a name's length before the name.
        if name := re.search(r"2kv4cuda(\d+)(\w+)", line):
            launches.append((name[2][: int(name[1])], int(line.split()[-1])))
    return launches


def lacks(method: Any) -> str | None:
    policy = method.policy()
    if policy is None:
        return f"the method {method.name} is no merge policy"
    if method.extra_state:
        return f"the method {method.name} keeps state of its own"
    return policy.why_not_native or None


class CudaOnHost(OfHeads):
    """The kernels' source compiled for the host, which tests their indexing, masks and orders without a GPU."""

    name = "cuda-on-host"

    def available(self) -> str | None:
        return None if make.is_current("cuda-host") else "the kernels are not compiled for the host: make cuda-host"

    @property
    def caller(self) -> Caller:
        return _host_caller()

    def layer_vote_attention(self, inputs: Arrays, attributes: Any, capacity: Sequence[int]) -> Arrays:
        return self.caller.layer_vote_attention(inputs, attributes, capacity)

    def lacks(self, attributes: Any) -> str | None:
        return lacks(attributes.method)

    def layer_merge_cache(self, state: Arrays, attributes: Sequence[Any], capacity: Sequence[int]) -> Arrays:
        return self.caller.layer_merge_cache(state, attributes, capacity)


class CudaPtx(CudaOnHost):
    """nvcc's PTX of the kernels, run on the host in random order, with checks of every access (plugins/tests/ptx)."""

    name = "cuda-ptx"

    def available(self) -> str | None:
        if lacking := make.missing("cuda-ptx"):
            return lacking
        return None if make.is_current("cuda-ptx") else "their PTX is not translated: make cuda-ptx"

    @property
    def caller(self) -> Caller:
        return _ptx_caller()


class PtxCaller(Caller):
    """A caller that fails on every fault that the PTX runner reports."""

    begin = EARLY

    def __init__(self, path: Path) -> None:
        super().__init__(load(path), HostMemory())
        self.library.kv_ptx_reports.restype = ctypes.c_char_p
        self.library.kv_ptx_instructions.restype = ctypes.c_uint64
        self.library.kv_ptx_instructions.argtypes = [ctypes.c_char_p, ctypes.c_int]
        self.library.kv_ptx_stretches.restype = ctypes.POINTER(ctypes.c_int)
        self.library.kv_ptx_stretches.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
        self.library.kv_host_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
        self.set_order(2, late=True)

    def set_order(self, order: int, *, late: bool, multiprocessors: int = 4) -> None:
        """Set the order of threads and blocks: 0 forwards, 1 backwards, 2 random. A late copy happens at its wait."""
        self.library.kv_host_set(order, late, multiprocessors, 101376)

    def instructions(self, program: str, of: int = 0) -> int:
        """Return the number of instructions of a program since the last call.

        `of` selects the sum over all threads (0), the sum over all warps of each warp's longest thread (1), or the
        longest thread (2).
        """
        return int(self.library.kv_ptx_instructions(program.encode(), of))

    def stretches(self, program: str) -> list[int]:
        """Return the stretches (trips.Stretches) that the first thread of a program's last block ran."""
        count = ctypes.c_size_t()
        numbers = self.library.kv_ptx_stretches(program.encode(), count)
        return numbers[: count.value]

    def _run(self, operator: str, *call: Any) -> None:
        try:
            super()._run(operator, *call)
        except RuntimeError as error:
            faults = self.library.kv_ptx_reports().decode()
            raise AssertionError(faults) if faults else error from None


class Cuda(CudaOnHost):
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
    return Caller(load(Path(os.environ.get(OTHER_LIBRARY) or HOST)), HostMemory())


@cache
def _ptx_caller() -> Caller:
    every = os.environ.get(EVERY_PTX)
    return PtxCaller(make.build("cuda-ptx", everything=True) if every else PTX)


@cache
def _device_caller() -> Caller:
    return Caller(load(DEVICE), DeviceMemory())
