"""The building half of `fake_tensorrt`. A plan is the ONNX graph from which it was parsed, with its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any

from tests.support.fake_tensorrt_plugins import get_plugin_registry

VERSION = "11.4.0.106"
ProfilingVerbosity = IntEnum("ProfilingVerbosity", "DETAILED")


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
    refused: str = ""  # an operator that the parser refuses

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network, self._logger = network, logger
        self._errors: list[ParserError] = []

    def parse(self, model: bytes, path: str | None = None) -> bool:
        import onnx

        assert path is not None
        model_proto = onnx.load_model_from_string(model)
        for node in model_proto.graph.node:
            registered = get_plugin_registry().get_creator(node.op_type, "1", "kvexport") is not None
            if node.op_type == self.refused or (node.domain == "kvexport" and not registered):
                self._errors.append(
                    ParserError(f"In node {node.name} and operator: {node.op_type} (...): UNSUPPORTED_NODE")
                )
        if self._errors:
            self._logger.log(ILogger.Severity.ERROR, str(self._errors[0]))
            return False
        for tensor in model_proto.graph.initializer:
            _read_external(tensor, Path(path).parent)
        self._network._model = model_proto
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


class IBuilderConfig:
    __slots__ = ("_profiles", "builder_optimization_level", "profiling_verbosity", "progress_monitor")
    seen: list[IBuilderConfig] = []  # noqa: RUF012

    def __init__(self) -> None:
        self._profiles: list[IOptimizationProfile] = []
        IBuilderConfig.seen.append(self)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1


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
        """Return a plan: the length of its description in 8 bytes, the description as JSON, and the ONNX model."""
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


def _read_external(tensor: Any, folder: Path) -> None:
    """Read a tensor's external data as TensorRT does. onnx's own reader refuses files with several names."""
    about = {entry.key: entry.value for entry in tensor.external_data}
    if not about:
        return
    with (folder / about["location"]).open("rb") as file:
        file.seek(int(about.get("offset", 0)))
        tensor.raw_data = file.read(int(about["length"]))
    del tensor.external_data[:]
    tensor.data_location = 0
