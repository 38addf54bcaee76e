"""TensorRT's Python API on the host: a plan is the ONNX graph it was parsed from, weights and all, and ONNX Runtime runs it.

Only what kvexport uses is there, under the real names and with the real parameters (`test_tensorrt_api.py` holds them to the real package);
another attribute is an AttributeError, as it is with pybind11's classes. A plugin is ONNX Runtime's native operator of the same name.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_cuda
import numpy as np
import pytest

VERSION = "11.4.0.106"
NUMPY = {1: np.float32, 10: np.float16, 6: np.int32, 7: np.int64}


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def __init__(self) -> None: ...
    def log(self, severity: Any, msg: str) -> None: ...


class IProgressMonitor:
    def __init__(self) -> None: ...
    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...
    def step_complete(self, phase_name: str, step: int) -> bool: ...
    def phase_finish(self, phase_name: str) -> None: ...


BuilderFlag = IntEnum("BuilderFlag", "REFIT VERSION_COMPATIBLE WEIGHT_STREAMING")
MemoryPoolType = IntEnum("MemoryPoolType", "WORKSPACE")
HardwareCompatibilityLevel = IntEnum("HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
ProfilingVerbosity = IntEnum("ProfilingVerbosity", "DETAILED")
PreviewFeature = IntEnum("PreviewFeature", "ALIASED_PLUGIN_IO_10_03")
PluginFieldType = IntEnum("PluginFieldType", "FLOAT32 INT32 CHAR")
TensorRTPhase = IntEnum("TensorRTPhase", "BUILD RUNTIME")
ExecutionContextAllocationStrategy = IntEnum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE")


class ITensor:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class INetworkDefinition:
    __slots__ = ("_model",)

    def __init__(self) -> None:
        self._model: Any = None

    @property
    def num_inputs(self) -> int:
        return len(self._model.graph.input)

    def get_input(self, index: int) -> ITensor:
        return ITensor(self._model.graph.input[index].name)


class ParserError:
    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


class OnnxParser:
    __slots__ = ("_errors", "_logger", "_network")
    refused: str = ""  # an operator that this parser does not know

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network, self._logger = network, logger
        self._errors: list[ParserError] = []

    def parse(self, model: bytes, path: str | None = None) -> bool:
        import onnx

        assert path is not None
        found = onnx.load_model_from_string(model)
        for node in found.graph.node:
            registered = get_plugin_registry().get_creator(node.op_type, "1", "kvexport") is not None
            if node.op_type == self.refused or (node.domain == "kvexport" and not registered):
                self._errors.append(ParserError(f"In node {node.name} and operator: {node.op_type} (...): UNSUPPORTED_NODE"))
        if self._errors:
            self._logger.log(ILogger.Severity.ERROR, str(self._errors[0]))
            return False
        for tensor in found.graph.initializer:
            _read_external(tensor, Path(path).parent)
        self._network._model = found
        return True

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]


class IOptimizationProfile:
    __slots__ = ("_shapes",)

    def __init__(self) -> None:
        self._shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, input: str, min: Iterable[int], opt: Iterable[int], max: Iterable[int]) -> None:
        self._shapes[input] = [list(min), list(opt), list(max)]
        assert all(a <= b <= c for a, b, c in zip(*self._shapes[input], strict=True)), input


class ITimingCache:
    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return self._data + b"timed "


class IBuilderConfig:
    __slots__ = (
        "_cache", "_flags", "_pools", "_previews", "_profiles", "builder_optimization_level", "hardware_compatibility_level",
        "plugins_to_serialize", "profiling_verbosity", "progress_monitor",
    )  # fmt: skip
    seen: IBuilderConfig | None = None  # the last one of all

    def __init__(self) -> None:
        self._flags: set[Any] = set()
        self._pools: dict[Any, int] = {}
        self._previews: dict[Any, bool] = {}
        self._profiles: list[IOptimizationProfile] = []
        self.plugins_to_serialize: list[str] = []
        IBuilderConfig.seen = self

    def set_flag(self, flag: Any) -> None:
        self._flags.add(BuilderFlag(flag))

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._pools[pool] = pool_size

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        self._previews[feature] = enable

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None:
        return None if serialized_timing_cache.startswith(b"damaged") else ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache:
        return self._cache


class Builder:
    __slots__ = ("_logger",)
    during_build: Callable[[], None] | None = None
    failing: str = ""

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes | None:
        """The length of what describes the plan, that, and the model."""
        if self.failing:
            self._logger.log(ILogger.Severity.ERROR, self.failing)
            return None
        self._logger.log(ILogger.Severity.INFO, "Building")
        self._logger.log(ILogger.Severity.VERBOSE, "Tactics")
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        for step in range(2):
            monitor.phase_start("Timing", "Building Engine", 4)
            for inner in range(4):
                if Builder.during_build:
                    Builder.during_build()
                if not monitor.step_complete("Timing", inner):
                    return None
            monitor.phase_finish("Timing")
            monitor.step_complete("Building Engine", step)
        monitor.phase_finish("Building Engine")
        about = json.dumps({"profiles": [p._shapes for p in config._profiles], "version": VERSION}).encode()
        return len(about).to_bytes(8, "little") + about + bytes(network._model.SerializeToString())


class Runtime:
    __slots__ = ("_logger", "engine_host_code_allowed")
    opened: list[bytes] = []  # noqa: RUF012

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        Runtime.opened.append(serialized_engine)
        if serialized_engine.startswith(b"bad"):
            self._logger.log(ILogger.Severity.ERROR, "Serialization assertion failed: magic tag does not match")
            return None
        return ICudaEngine(serialized_engine)


class ICudaEngine:
    __slots__ = ("_inputs", "_outputs", "_profiles", "_session", "weight_streaming_budget_v2")
    streamable_weights_size = 1000

    def __init__(self, plan: bytes) -> None:
        import onnxruntime as ort

        from kvexport.native import library

        size = int.from_bytes(plan[:8], "little")
        self._profiles = json.loads(plan[8 : 8 + size])["profiles"]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        if library() is not None:
            options.register_custom_ops_library(str(library()))
        self._session = ort.InferenceSession(plan[8 + size :], options, providers=["CPUExecutionProvider"])
        self._inputs, self._outputs = ([x.name for x in found] for found in (self._session.get_inputs(), self._session.get_outputs()))

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def create_execution_context(self, strategy: Any = ExecutionContextAllocationStrategy.STATIC) -> IExecutionContext:
        return IExecutionContext(self)


class IExecutionContext:
    __slots__ = ("_addresses", "_engine", "_profile", "_shapes")

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine, self._profile = engine, engine._profiles[0]
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

    def execute_async_v3(self, stream_handle: int) -> bool:
        current().streams[stream_handle].add(self._work(dict(self._shapes), dict(self._addresses)))
        return True

    def _work(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> Callable[[], None]:
        session = self._engine._session
        dtypes = {i.name: _dtype(i.type) for i in session.get_inputs()}

        def run() -> None:
            feed = {name: _read(addresses[name], shapes[name], dtype) for name, dtype in dtypes.items()}
            for name, array in zip(self._engine._outputs, session.run(self._engine._outputs, feed), strict=True):
                array = np.ascontiguousarray(array)
                ctypes.memmove(addresses[name], array.ctypes.data, array.nbytes)

        return run


class PluginField:
    __slots__ = ("data", "name", "type")

    def __init__(self, name: str, data: Any, type: Any) -> None:
        self.name, self.data, self.type = name, data, type


def PluginFieldCollection(fields: list[PluginField]) -> list[PluginField]:
    return fields


class IPluginCreatorV3One:
    __slots__ = ("name", "plugin_namespace", "plugin_version")
    refused: str = ""  # the plugin that is not made
    fields: dict[str, Any] = {}  # noqa: RUF012  # of the last one

    def __init__(self, name: str, version: str) -> None:
        self.name, self.plugin_version, self.plugin_namespace = name, version, "kvexport"

    def create_plugin(self, name: str, field_collection: list[PluginField], phase: Any) -> object | None:
        IPluginCreatorV3One.fields = {f.name: (f.type.name, f.data.tolist()) for f in field_collection}
        return None if self.name == self.refused else object()


class IPluginRegistry:
    __slots__ = ("all_creators", "loaded")

    def __init__(self) -> None:
        self.all_creators: list[IPluginCreatorV3One] = []
        self.loaded: list[str] = []

    def load_library(self, plugin_path: str) -> object | None:
        """A library is a file that lists its plugins' names and versions."""
        self.loaded.append(plugin_path)
        text = Path(plugin_path).read_text()
        if not text.startswith("plugins"):
            return None
        self.all_creators += [IPluginCreatorV3One(*line.split()) for line in text.splitlines()[1:]]
        return object()

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> IPluginCreatorV3One | None:
        found = (c for c in self.all_creators if (c.name, c.plugin_version, c.plugin_namespace) == (type, version, plugin_namespace))
        return next(found, None)


_registry = IPluginRegistry()
_cuda: fake_cuda.FakeCuda | None = None


def get_plugin_registry() -> IPluginRegistry:
    return _registry


def current() -> fake_cuda.FakeCuda:
    assert _cuda is not None
    return _cuda


def _read_external(tensor: Any, folder: Path) -> None:
    """As TensorRT does, without onnx's own refusal of files that have several names."""
    about = {entry.key: entry.value for entry in tensor.external_data}
    if not about:
        return
    with (folder / about["location"]).open("rb") as file:
        file.seek(int(about.get("offset", 0)))
        tensor.raw_data = file.read(int(about["length"]))
    del tensor.external_data[:]
    tensor.data_location = 0


def _dtype(name: str) -> Any:
    return {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32, "tensor(int64)": np.int64}[name]


def _read(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    count = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, count), dtype=dtype).reshape(shape)


NAMES = (
    "ILogger", "IProgressMonitor", "BuilderFlag", "MemoryPoolType", "HardwareCompatibilityLevel", "ProfilingVerbosity", "PreviewFeature",
    "PluginFieldType", "TensorRTPhase", "ExecutionContextAllocationStrategy", "ITensor", "INetworkDefinition", "ParserError", "OnnxParser",
    "IOptimizationProfile", "ITimingCache", "IBuilderConfig", "Builder", "Runtime", "ICudaEngine", "IExecutionContext", "PluginField",
    "PluginFieldCollection", "IPluginCreatorV3One", "IPluginRegistry", "get_plugin_registry",
)  # fmt: skip
LEAN = (
    "ILogger", "Runtime", "ICudaEngine", "IExecutionContext", "ExecutionContextAllocationStrategy", "get_plugin_registry",
    "IPluginRegistry", "IPluginCreatorV3One",
)  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, cuda: fake_cuda.FakeCuda, *, version: str = VERSION, lean: bool = False) -> ModuleType:
    """`import tensorrt` (or tensorrt_lean, and no tensorrt) gives these, over that GPU, with nothing registered."""
    global _registry, _cuda
    _registry, _cuda = IPluginRegistry(), cuda
    Runtime.opened.clear()
    fake_cuda.install(monkeypatch, cuda)
    module = ModuleType("tensorrt_lean" if lean else "tensorrt")
    module.__version__ = version  # type: ignore[attr-defined]
    for name in LEAN if lean else NAMES:
        setattr(module, name, globals()[name])
    monkeypatch.setitem(sys.modules, "tensorrt", None if lean else module)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorrt_lean", module if lean else None)  # type: ignore[arg-type]
    return module
