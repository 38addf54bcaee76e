"""The implementations of the two operators that the suite compares with the oracle; `BACKENDS` lists them.

`test_backends.py` names every backend that this machine cannot run. ``KVEXPORT_BACKENDS=a,b`` runs only those, and
fails if one of them is unknown or cannot run.
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvexport.methods.base import Method
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.schema.state import SCALES as SCALE_TENSORS
from kvexport.schema.state import STATE_NAMES as STATE
from plugins.building import make
from tests.conformance.cuda_library import SMALL_TYPES, Cuda, CudaOnHost, CudaPtx, cache_type_of
from tests.conformance.layout import OfHeads

Arrays = dict[str, np.ndarray]
INPUTS = (
    "query", "key", "value", "position", "query_length", "past_key", "past_value", "past_votes", "past_score",
    "past_position", "sink_logits",
)  # fmt: skip
PRESENT = tuple(f"present_{name}" for name in STATE)
SCALES = tuple(tensor.name for tensor in SCALE_TENSORS)
SYMBOLIC = {
    "query": {0: "B", 2: "T"}, "key": {0: "B", 2: "T"}, "value": {0: "B", 2: "T"}, "position": {0: "B", 1: "T"},
    "query_length": {0: "B"}, "sink_logits": {}, "output": {0: "B", 2: "T"},
    **{
        f"{prefix}_{name}": {0: "B", (2 if name == "score" else 1): "S"}
        for prefix in ("past", "present") for name in (*STATE, *SCALES)
    },
}  # fmt: skip


def state_names(key: np.ndarray, method: Method | None = None) -> tuple[str, ...]:
    """Return the names of the state tensors of a cache with keys of this type, and of the method."""
    own = tuple(tensor.name for tensor in method.extra_state) if method else ()
    return (*STATE, *(SCALES if key.dtype in (np.int8, np.uint8) else ()), *own)


def _sizes(key: np.ndarray, value: np.ndarray) -> tuple[int, int]:
    """Return the sizes of a key and of a value in a cache; a byte of uint8 contains two numbers."""
    first, second = (x.shape[-1] * (2 if x.dtype == np.uint8 else 1) for x in (key, value))
    return first, second


class Backend(Protocol):
    """An implementation of both operators, over numpy arrays with the names of the contract (section 3).

    Here state tensors have the dimensions [B, H, C, ...], and `OfHeads` puts them into the layout of the contract. The
    scales of a quantized cache follow the five tensors, and a method's own tensors follow the scales.
    """

    name: str

    def available(self) -> str | None:
        """Return why this machine cannot run the backend, or None if it can."""

    def vote_attention(self, inputs: Arrays, attributes: VoteAttentionAttributes) -> Arrays:
        """Return `output` and the five `present_*`, by name. The inputs of a model without sinks lack `sink_logits`."""

    def vote_attention_of(self, parts: Sequence[Arrays], attributes: VoteAttentionAttributes) -> list[Arrays]:
        """Return those of parts of a layer, whose KV heads may have different capacities."""

    def lacks(self, attributes: MergeCacheAttributes) -> str | None:
        """Return why the backend has no kernel for this merge, or None if it has one."""

    def merge_cache(self, state: Arrays, attributes: MergeCacheAttributes) -> Arrays:
        """Return the five `present_*` tensors by name."""

    def merge_cache_of(self, parts: Sequence[Arrays], attributes: Sequence[MergeCacheAttributes]) -> list[Arrays]:
        """Return those of parts of a layer, each with budget and recent window of its own."""


class Torch(OfHeads):
    name = "torch"

    def available(self) -> str | None:
        return None

    def layer_vote_attention(
        self, inputs: Arrays, attributes: VoteAttentionAttributes, capacity: Sequence[int]
    ) -> Arrays:
        import torch

        from kvexport.ops.layer_state import layer_vote_attention

        state = state_names(inputs["past_key"], attributes.method)
        names = (*INPUTS, *(f"past_{name}" for name in state[len(STATE) :]))
        tensors: list[Any] = [torch.from_numpy(inputs[name]) if name in inputs else None for name in names]
        result = layer_vote_attention(*tensors, attributes=attributes, capacity=capacity)
        return _named(_outputs(state), [x.numpy() for x in result])

    def lacks(self, attributes: MergeCacheAttributes) -> str | None:
        return None

    def layer_merge_cache(
        self, state: Arrays, attributes: Sequence[MergeCacheAttributes], capacity: Sequence[int]
    ) -> Arrays:
        import torch

        from kvexport.ops.layer_state import layer_merge_cache

        names = state_names(state["key"], attributes[0].method)
        tensors = [torch.from_numpy(state[name]) for name in names]
        result = layer_merge_cache(*tensors, attributes=attributes, capacity=capacity)
        return _named(_outputs(names)[1:], [x.numpy() for x in result])


class OnnxFunction(OfHeads):
    """The ONNX functions of the operators, inlined by ONNX Runtime on the CPU. Tracing one of them takes seconds."""

    name = "onnx-function"

    def available(self) -> str | None:
        return None

    def layer_vote_attention(
        self, inputs: Arrays, attributes: VoteAttentionAttributes, capacity: Sequence[int]
    ) -> Arrays:
        return _run_vote_attention(inputs, attributes, capacity)

    def lacks(self, attributes: MergeCacheAttributes) -> str | None:
        return None

    def layer_merge_cache(
        self, state: Arrays, attributes: Sequence[MergeCacheAttributes], capacity: Sequence[int]
    ) -> Arrays:
        return _run_merge_cache(state, attributes, capacity)


class NativeCpu(OfHeads):
    """The native operators in ONNX Runtime on the CPU, in models of one node without a function."""

    name = "native-cpu"
    device = "cpu"

    def path(self) -> Path | None:
        from kvexport.backends.onnxruntime.operators import library

        return library()

    def available(self) -> str | None:
        return None if self.path() else "the native operators are not built: make native"

    def layer_vote_attention(
        self, inputs: Arrays, attributes: VoteAttentionAttributes, capacity: Sequence[int]
    ) -> Arrays:
        return _run_vote_attention(inputs, attributes, capacity, self.path())

    def lacks(self, attributes: MergeCacheAttributes) -> str | None:
        from kvexport.backends.onnxruntime.operators import why_function

        return why_function(self.path(), "MergeCache", attributes.method, self.device)

    def layer_merge_cache(
        self, state: Arrays, attributes: Sequence[MergeCacheAttributes], capacity: Sequence[int]
    ) -> Arrays:
        return _run_merge_cache(state, attributes, capacity, self.path())


class CudaBindingOnHost(NativeCpu):
    """ONNX Runtime's binding of the CUDA kernels, all compiled for the host and registered with the CPU provider."""

    name = "onnxruntime-cuda-on-host"
    device = "cuda"

    def path(self) -> Path | None:
        return make.host_output("onnxruntime-cuda-host")

    def available(self) -> str | None:
        current = make.is_current("onnxruntime-cuda-host")
        return None if current else "the binding is not compiled for the host: make cuda-host"


BACKENDS: list[Backend] = [
    Torch(), OnnxFunction(), NativeCpu(), CudaOnHost(), CudaBindingOnHost(), CudaPtx(), Cuda()
]  # fmt: skip


def chosen() -> list[str]:
    """Return the backends that ``KVEXPORT_BACKENDS`` names, or all backends if the variable is not set."""
    names = os.environ.get("KVEXPORT_BACKENDS", "")
    return [name.strip() for name in names.split(",") if name.strip()] or [backend.name for backend in BACKENDS]


def reached() -> list[Backend]:
    return [backend for backend in BACKENDS if backend.name in chosen() and backend.available() is None]


def _outputs(state: tuple[str, ...]) -> tuple[str, ...]:
    return ("output", *(f"present_{name}" for name in state))


def _run_vote_attention(
    inputs: Arrays, attributes: VoteAttentionAttributes, capacity: Sequence[int], native: Path | None = None
) -> Arrays:
    heads = (inputs["query"].shape[1], inputs["key"].shape[1])
    sizes = (inputs["key"].shape[3], inputs["value"].shape[3])
    types = (inputs["query"].dtype.name, cache_type_of(inputs["past_key"], inputs["past_value"]))
    sinks, own = "sink_logits" in inputs, _unequal(capacity)
    session = _vote_attention_session(attributes, heads, sizes, types, sinks, own, native)
    names = _outputs(state_names(inputs["past_key"], attributes.method))
    return _named(names, session.run(list(names), inputs))


def _run_merge_cache(
    state: Arrays, attributes: Sequence[MergeCacheAttributes], capacity: Sequence[int], native: Path | None = None
) -> Arrays:
    sizes, cache_type = _sizes(state["key"], state["value"]), cache_type_of(state["key"], state["value"])
    # Heads of one capacity that differ in other ways need the attribute too, but only in a function.
    own = tuple(capacity) if len({*attributes}) > 1 else _unequal(capacity)
    session = _merge_cache_session(tuple(attributes), sizes, state["score"].shape[1], cache_type, own, native)
    names = _outputs(state_names(state["key"], attributes[0].method))[1:]
    return _named(names, session.run(list(names), state))


def _unequal(capacity: Sequence[int]) -> tuple[int, ...]:
    """Return the capacities of heads that differ; none for heads of one capacity, of which a session takes any."""
    return tuple(capacity) if len({*capacity}) > 1 else ()


def _named(names: tuple[str, ...], arrays: list[np.ndarray]) -> Arrays:
    return dict(zip(names, arrays, strict=True))


@cache
def _vote_attention_session(
    attributes: VoteAttentionAttributes,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    types: tuple[str, str],
    sinks: bool,
    capacity: tuple[int, ...],
    native: Path | None,
) -> Any:
    import torch

    from kvexport.ops.layer_state import vote_attention_functions
    from kvexport.ops.onnx_function import vote_attention_node_attributes

    dtype, cache_type = types
    function = (
        None
        if native
        else vote_attention_functions(
            attributes,
            heads=heads,
            head_sizes=sizes,
            dtype=getattr(torch, dtype),
            cache_type="" if cache_type == dtype else cache_type,
            sinks=sinks,
            capacity=capacity,
        )
    )
    (query_heads, kv_heads), (key_size, value_size), float_type = heads, sizes, np.dtype(dtype)
    tokens = {
        "query": (0, query_heads, 0, key_size), "key": (0, kv_heads, 0, key_size),
        "value": (0, kv_heads, 0, value_size), "output": (0, query_heads, 0, value_size), "position": (0, 0),
        "query_length": (0, 1), "sink_logits": (query_heads,),
    }  # fmt: skip
    stored = (key_size, 0 if attributes.value_prefix else value_size)
    state = _state_shapes(stored, len(attributes.statistics), cache_type)
    shapes = {
        **tokens,
        **{f"{prefix}_{name}": shape for prefix in ("past", "present") for name, shape in state.items()},
    }
    of = dict.fromkeys(shapes, float_type) | {"position": np.dtype(np.int64), "query_length": np.dtype(np.int64)}
    of |= {"sink_logits": np.dtype(np.float32)} | {
        f"{p}_{n}": t for p in ("past", "present") for n, t in _state_types(cache_type).items()
    }
    for tensor in attributes.method.extra_state if attributes.method else ():
        state[tensor.name] = tuple(tensor.shape({"B": 0, "H": kv_heads, "S": 0, "D": key_size, "Dv": value_size}))
        shapes |= {f"{prefix}_{tensor.name}": state[tensor.name] for prefix in ("past", "present")}
        of |= {f"{prefix}_{tensor.name}": np.dtype(tensor.dtype) for prefix in ("past", "present")}
    beside = [f"past_{name}" for name in state if name not in STATE]
    inputs = [name if name != "sink_logits" or sinks else "" for name in INPUTS] + beside
    while not inputs[-1]:
        inputs.pop()
    infos = {
        name: (of[name], [SYMBOLIC.get(name, {0: "B"}).get(i, d) for i, d in enumerate(shape)])
        for name, shape in shapes.items()
    }
    node = vote_attention_node_attributes(attributes, capacity)
    return node_session("VoteAttention", function or native, node, inputs, list(_outputs(tuple(state))), infos)


@cache
def _merge_cache_session(
    attributes: tuple[MergeCacheAttributes, ...],
    sizes: tuple[int, int],
    statistics: int,
    cache_type: str,
    capacity: tuple[int, ...],
    native: Path | None,
) -> Any:
    from kvexport.ops.layer_state import merge_cache_functions
    from kvexport.ops.onnx_function import merge_cache_node_attributes

    heads, method = len(attributes), attributes[0].method
    function = (
        None
        if native
        else merge_cache_functions(attributes, head_sizes=sizes, cache_type=cache_type, capacity=capacity)
    )
    types = _state_types(cache_type)
    infos = {}
    state = _state_shapes(sizes, statistics, cache_type)
    for tensor in method.extra_state:
        state[tensor.name] = tuple(tensor.shape({"B": 0, "H": heads, "S": 0, "D": sizes[0], "Dv": sizes[1]}))
        types[tensor.name] = np.dtype(tensor.dtype)
    for name, shape in state.items():
        for full_name in (name, f"present_{name}"):
            symbols = SYMBOLIC.get(f"past_{name}", {0: "B"})
            infos[full_name] = (types[name], [symbols.get(i, d) for i, d in enumerate(shape)])
    outputs = list(_outputs(tuple(state))[1:])
    node = merge_cache_node_attributes(attributes, capacity)
    return node_session("MergeCache", function or native, node, list(state), outputs, infos)


def _state_shapes(sizes: tuple[int, int], statistics: int, cache_type: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the state. A 0 stands for a batch or a number of slots of any size."""
    slots = (0, 0)
    scales = dict.fromkeys(SCALES, slots) if cache_type in SMALL_TYPES.values() else {}
    types = _state_types(cache_type)
    return {
        "key": (*slots, sizes[0] // (2 if types["key"] == np.uint8 else 1)),
        "value": (*slots, sizes[1] // (2 if types["value"] == np.uint8 else 1)),
        "votes": slots,
        "score": (0, statistics, 0),
        "position": slots,
        **scales,
    }


def _state_types(cache_type: str) -> dict[str, np.dtype[Any]]:
    f32 = np.dtype(np.float32)
    held = next((types for types, name in SMALL_TYPES.items() if name == cache_type), (cache_type, cache_type))
    return {
        "key": np.dtype(held[0]),
        "value": np.dtype(held[1]),
        "votes": f32,
        "score": f32,
        "position": np.dtype(np.int32),
        **dict.fromkeys(SCALES, f32),
    }


def node_session(
    op: str, meaning: Any, attributes: dict[str, Any], inputs: list[str], outputs: list[str], infos: dict[str, Any]
) -> Any:
    import onnx
    import onnxruntime
    from onnx import helper

    from kvexport.ops.onnx_function import DOMAIN, OPSET, VERSION

    functions = [] if isinstance(meaning, Path) else meaning

    def info(name: str) -> Any:
        dtype, shape = infos[name]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)

    node = helper.make_node(
        op, inputs, outputs, domain=DOMAIN, overload=functions[0].overload if functions else "", **attributes
    )
    model = helper.make_model(
        helper.make_graph(
            [node], "one_node", [info(name) for name in inputs if name], [info(name) for name in outputs]
        ),
        functions=functions,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=11,
    )
    options = onnxruntime.SessionOptions()
    if functions:
        onnx.checker.check_model(model, full_check=True)
    else:
        options.register_custom_ops_library(str(meaning))
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
