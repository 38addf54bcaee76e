"""The TensorRT plugins called through ctypes as TensorRT calls them (plugins/tests/tensorrt_harness.cpp).

The plugins' own source runs, with the kernels and CUDA's runtime on the host. Tensors are numpy arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from kvexport.methods import all_methods
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import merge_cache_node_attributes, vote_attention_node_attributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from plugins.building import make
from tests.conformance.cuda_library import STATE, HostMemory
from tests.conformance.layout import OfHeads

Arrays = dict[str, np.ndarray]
FLOAT, HALF, INT8, INT32, INT64 = 0, 1, 2, 3, 8  # nvinfer1::DataType
TYPES = {
    "float32": FLOAT, "float16": HALF, "int8": INT8, "int32": INT32, "int64": INT64,
}  # fmt: skip
"""The types of TensorRT by numpy's names."""
FIELD_FLOAT32, FIELD_INT32, FIELD_CHAR, FIELD_INT64 = 1, 5, 6, 10  # nvinfer1::PluginFieldType
LINEAR = 0
BUILD, RUNTIME = 0, 1
INPUTS = ("query", "key", "value", "position", "query_length", *(f"past_{name}" for name in STATE), "sink_logits")


def what_is_missing(target: str = "tensorrt-harness") -> str | None:
    """Return why a target of the plugins cannot be compiled on this machine, or None."""
    lacks = make.missing(target)
    return f"not reached: the TensorRT plugins: {lacks}" if lacks else None


class Field(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_char_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int64 * 8),
        ("most", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, kind: int, shape: Sequence[int], most: Sequence[int] | None = None, data: int | None = None) -> Tensor:
        sizes = ctypes.c_int64 * 8
        return cls(kind, LINEAR, len(shape), sizes(*shape), sizes(*(most or shape)), data)

    @property
    def shape(self) -> list[int]:
        return list(self.size[: self.rank])


def parsed(attributes: Mapping[str, Any]) -> dict[str, tuple[int, bytes, int]]:
    """Return the fields (type, bytes, length) that TensorRT's parser makes of a node's attributes."""
    fields = {}
    for name, value in attributes.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, str):
            fields[name] = (FIELD_CHAR, value.encode() + b"\0", len(value) + 1)
        elif isinstance(values[0], float):
            fields[name] = (FIELD_FLOAT32, np.array(values, np.float32).tobytes(), len(values))
        else:
            fields[name] = (FIELD_INT32, np.array(values, np.int32).tobytes(), len(values))
    return fields


ATTENTION = parsed(
    vote_attention_node_attributes(
        VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9), Statistic("probability")))
    )
)
MERGE = parsed(merge_cache_node_attributes([MergeCacheAttributes(all_methods()["h2o"](), 64, 2, 8)] * 2))
FIELDS = {
    "VoteAttention": ATTENTION, "MergeCache": MERGE,
}  # fmt: skip
"""The fields of one plugin of each operator."""


def fields_of(node: onnx.NodeProto) -> dict[str, tuple[int, bytes, int]]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    values = {name: x.decode() if isinstance(x, bytes) else x for name, x in values.items()}
    return parsed({name: x for name, x in values.items() if name not in ("plugin_version", "plugin_namespace")})


class Harness:
    def __init__(self, path: Path) -> None:
        self.library = library = ctypes.CDLL(str(path))
        for name in ("create", "clone", "attach", "again"):
            getattr(library, f"kvt_{name}").restype = ctypes.c_void_p
        for name in ("log", "identity", "timing_cache_id"):
            getattr(library, f"kvt_{name}").restype = ctypes.c_char_p
        library.kvt_supports.restype, library.kvt_workspace.restype = ctypes.c_bool, ctypes.c_size_t

    @property
    def cuda_calls(self) -> int:
        return ctypes.c_int.in_dll(self.library, "kv_cuda_runtime_calls").value

    def log(self) -> str:
        return str(self.library.kvt_log().decode())

    def create(self, op: str, fields: Mapping[str, tuple[int, bytes, int]], phase: int = BUILD) -> Plugin | None:
        """Create a plugin, or return None if the creator refuses. `log` has the reason."""
        array = (Field * len(fields))(
            *(Field(name.encode(), data, kind, length) for name, (kind, data, length) in fields.items())
        )
        address = self.library.kvt_create(op.encode(), array, len(fields), phase)
        return Plugin(self, address) if address else None


class Plugin:
    def __init__(self, harness: Harness, at: int) -> None:
        self.harness, self.at = harness, ctypes.c_void_p(at)

    def __del__(self) -> None:
        self.harness.library.kvt_delete(self.at)

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.harness.library, f"kvt_{name}")(self.at, *arguments)

    def another(self, how: str) -> Plugin:
        """Return a copy, by "clone", "attach" (to a context) or "again" (from the fields that an engine stores)."""
        address = self._call(how)
        assert address, self.harness.log()
        return Plugin(self.harness, address)

    @property
    def identity(self) -> str:
        return str(self._call("identity").decode())

    @property
    def timing_cache_id(self) -> str:
        return str(self._call("timing_cache_id").decode())

    @property
    def outputs(self) -> int:
        return int(self._call("outputs"))

    def call(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None, *more: Any) -> Any:
        self._outputs = (Tensor * self.outputs)(*(outputs or [Tensor.of(FLOAT, ())] * self.outputs))
        return self._call(name, (Tensor * len(inputs))(*inputs), len(inputs), self._outputs, self.outputs, *more)

    def output_shapes(self, inputs: Sequence[Tensor]) -> list[list[int]] | None:
        return None if self.call("output_shapes", inputs) else [tensor.shape for tensor in self._outputs]

    def output_types(self, inputs: Sequence[Tensor]) -> list[int] | None:
        return None if self.call("output_types", inputs) else [tensor.type for tensor in self._outputs]

    def supports(self, at: int, tensors: Sequence[Tensor]) -> bool:
        return bool(
            self._call("supports", at, (Tensor * len(tensors))(*tensors), len(tensors) - self.outputs, self.outputs)
        )


class Caller(OfHeads):
    """The operators, run by plugins that were created, serialized, read again and attached to a context."""

    def __init__(self, harness: Harness, memory: Any = None) -> None:
        self.harness, self.memory = harness, memory or HostMemory()

    def layer_vote_attention(
        self, inputs: Arrays, attributes: Any, capacity: Sequence[int], *, in_place: bool = True
    ) -> Arrays:
        feed = {name: inputs[name] for name in INPUTS if name in inputs}
        names = ("output", *(f"present_{name}" for name in STATE))
        fields = parsed(vote_attention_node_attributes(attributes, capacity))
        return self._run("VoteAttention", fields, feed, names, "past_", in_place)

    def layer_merge_cache(
        self, state: Arrays, attributes: Sequence[Any], capacity: Sequence[int], *, in_place: bool = True
    ) -> Arrays:
        feed = {name: state[name] for name in STATE}
        names = tuple(f"present_{name}" for name in STATE)
        fields = parsed(merge_cache_node_attributes(attributes, capacity))
        return self._run("MergeCache", fields, feed, names, "", in_place)

    def node(self, node: onnx.NodeProto, tensors: Arrays, *, in_place: bool = False) -> Arrays:
        feed = {name: tensors[name] for name in node.input}
        return self._run(node.op_type, fields_of(node), feed, list(node.output), "past_", in_place)

    def _run(self, *call: Any) -> Arrays:
        enqueue, outputs = self._prepared(*call)
        enqueue()
        return {name: self.memory.get(x) for name, x in outputs.items()}

    def _prepared(
        self, op: str, fields: Mapping[str, Any], feed: Arrays, names: Sequence[str], past: str, in_place: bool
    ) -> tuple[Callable[[], None], dict[str, Any]]:
        created = self.harness.create(op, fields)
        if created is None:
            raise RuntimeError(self.harness.log())
        plugin = created.another("again").another("attach")
        held = {name: self.memory.put(x) for name, x in feed.items()}
        tensors = [
            Tensor.of(TYPES[x.dtype.name], x.shape, data=self.memory.address(held[name])) for name, x in feed.items()
        ]
        shapes, types = plugin.output_shapes(tensors), plugin.output_types(tensors)
        assert shapes is not None and types is not None, self.harness.log()
        dtypes = {number: np.dtype(name) for name, number in TYPES.items()}
        # When the operator does not work in place, its outputs are filled with a value that it would not write.
        held_outputs = {
            name: self.memory.put(np.full(s, 77, dtypes[t])) for name, s, t in zip(names, shapes, types, strict=True)
        }
        if in_place:
            held_outputs |= {
                name: held[name.replace("present_", past)] for name in names if name.startswith("present_")
            }
        addresses = [self.memory.address(held_outputs[name]) for name in names]
        outputs = [Tensor.of(t, shape, data=data) for t, shape, data in zip(types, shapes, addresses, strict=True)]
        assert all(plugin.supports(i, [*tensors, *outputs]) for i in range(len(tensors) + len(outputs)))
        assert plugin.call("configure", tensors, outputs) == 0, self.harness.log()
        workspace = self.memory.bytes(plugin.call("workspace", tensors, outputs), 0)[1:]  # not aligned
        assert plugin.call("shape_change", tensors, outputs) == 0, self.harness.log()
        input_array, output_array, scratch = (
            (Tensor * len(tensors))(*tensors),
            (Tensor * len(outputs))(*outputs),
            self.memory.address(workspace),
        )
        run = self.harness.library.kvt_enqueue

        def enqueue(alive: Any = (plugin, held, held_outputs, workspace)) -> None:
            assert (
                run(plugin.at, input_array, len(input_array), output_array, len(output_array), ctypes.c_void_p(scratch))
                == 0
            ), self.harness.log()

        return enqueue, held_outputs
