"""A fake of TensorRT's Python API on the host.

A plan is the ONNX graph from which it was parsed, with its weights. ONNX Runtime runs it. A plugin is ONNX Runtime's
native operator of the same name.

The fake has only the names that kvexport uses, with the real parameters; `tests/backends/tensorrt/test_api.py` compares
them with the real package. Any other attribute raises an AttributeError, as pybind11's classes do.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support import fake_cuda
from tests.support.fake_tensorrt_builder import (  # noqa: F401
    VERSION,
    Builder,
    IBuilderConfig,
    ILogger,
    INetworkDefinition,
    IOptimizationProfile,
    IProgressMonitor,
    ITensor,
    OnnxParser,
    ParserError,
    ProfilingVerbosity,
)
from tests.support.fake_tensorrt_plugins import (  # noqa: F401
    IPluginCreatorV3One,
    IPluginRegistry,
    PluginField,
    PluginFieldCollection,
    PluginFieldType,
    TensorRTPhase,
    forget_plugins,
    get_plugin_registry,
)

ExecutionContextAllocationStrategy = IntEnum(
    "ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED"
)


class Runtime:
    __slots__ = ("_logger",)
    opened: list[bytes] = []  # noqa: RUF012

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        Runtime.opened.append(serialized_engine)
        if serialized_engine.startswith(b"bad"):
            self._logger.log(ILogger.Severity.ERROR, "Serialization assertion failed: magic tag does not match")
            return None
        return ICudaEngine(serialized_engine)


class ICudaEngine:
    __slots__ = ("_inputs", "_outputs", "_profiles", "_session")
    device_memory_size_v2 = 300

    def __init__(self, plan: bytes) -> None:
        import onnxruntime as ort

        from kvexport.backends.onnxruntime.operators import library

        size = int.from_bytes(plan[:8], "little")
        self._profiles = json.loads(plan[8 : 8 + size])["profiles"]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        if library() is not None:
            options.register_custom_ops_library(str(library()))
        self._session = ort.InferenceSession(plan[8 + size :], options, providers=["CPUExecutionProvider"])
        self._inputs, self._outputs = (
            [x.name for x in tensors] for tensors in (self._session.get_inputs(), self._session.get_outputs())
        )

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def create_execution_context(self, strategy: Any = ExecutionContextAllocationStrategy.STATIC) -> IExecutionContext:
        return IExecutionContext(self, strategy != ExecutionContextAllocationStrategy.USER_MANAGED)


class IExecutionContext:
    __slots__ = ("_addresses", "_engine", "_memory", "_profile", "_shapes")

    def __init__(self, engine: ICudaEngine, has_memory: bool) -> None:
        self._engine, self._profile = engine, engine._profiles[0]
        self._memory = has_memory
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if profile_index >= len(self._engine._profiles):
            return False
        self._profile = self._engine._profiles[profile_index]
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self._profile[name]
        self._shapes[name] = tuple(shape)
        return len(shape) == len(least) and all(a <= x <= b for a, x, b in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory % 256 == 0

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0 and size == self._engine.device_memory_size_v2
        ctypes.memset(memory, 0xCD, size)
        self._memory = True

    def execute_async_v3(self, stream_handle: int) -> bool:
        stream = current().streams[stream_handle]
        stream.add(self._work(dict(self._shapes), dict(self._addresses), stream.graph is not None))
        return self._memory

    def _work(
        self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int], captured: bool
    ) -> Callable[[], None]:
        session = self._engine._session
        dtypes = {i.name: _dtype(i.type) for i in session.get_inputs()}

        def run() -> None:
            if captured:
                assert (self._shapes, self._addresses) == (shapes, addresses), (
                    "the CUDA graph belongs to an earlier state of its context"
                )
            feed = {name: _read(addresses[name], shapes[name], dtype) for name, dtype in dtypes.items()}
            for name, array in zip(self._engine._outputs, session.run(self._engine._outputs, feed), strict=True):
                array = np.ascontiguousarray(array)
                ctypes.memmove(addresses[name], array.ctypes.data, array.nbytes)

        return run


_cuda: fake_cuda.FakeCuda | None = None


def current() -> fake_cuda.FakeCuda:
    assert _cuda is not None
    return _cuda


def _dtype(name: str) -> Any:
    return {
        "tensor(float)": np.float32,
        "tensor(float16)": np.float16,
        "tensor(int32)": np.int32,
        "tensor(int64)": np.int64,
    }[name]


def _read(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    count = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, count), dtype=dtype).reshape(shape)


NAMES = (
    "ILogger", "IProgressMonitor", "ProfilingVerbosity",
    "PluginFieldType", "TensorRTPhase", "ExecutionContextAllocationStrategy", "ITensor",
    "INetworkDefinition", "ParserError", "OnnxParser", "IOptimizationProfile", "IBuilderConfig",
    "Builder", "Runtime", "ICudaEngine", "IExecutionContext", "PluginField", "PluginFieldCollection",
    "IPluginCreatorV3One", "IPluginRegistry", "get_plugin_registry",
)  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, cuda: fake_cuda.FakeCuda, *, version: str = VERSION) -> ModuleType:
    """Make `import tensorrt` give this fake on the GPU `cuda`, with no plugin registered."""
    global _cuda
    _cuda = cuda
    forget_plugins()
    Runtime.opened.clear()
    IBuilderConfig.seen.clear()
    fake_cuda.install(monkeypatch, cuda)
    module = ModuleType("tensorrt")
    module.__version__ = version  # type: ignore[attr-defined]
    for name in NAMES:
        setattr(module, name, globals()[name])
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module
