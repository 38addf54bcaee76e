"""TensorRT and the GPU as this machine has them, asked for before either is touched: TensorRT itself crashes without a
driver."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from kvexport.backends.sections import default
from kvexport.errors import EnvironmentProblem

OLDEST = (11,)  # of TensorRT: strongly typed networks only, int64, the operators of opset 23
OLDEST_GPU = (7, 5)  # of every TensorRT 11
INSTALL = "pip install 'kvexport[tensorrt]', or use the image of docker/tensorrt.Dockerfile"
REBUILD = "kvexport build --from ARTIFACT --backend tensorrt, on the machine that is to run it"


@dataclass(frozen=True)
class Gpu:
    """A GPU. compute_capability: (major, minor)."""

    name: str
    compute_capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {dotted(self.compute_capability)})"


def dotted(numbers: tuple[int, ...]) -> str:
    """(9, 0) as "9.0"."""
    return ".".join(map(str, numbers))


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "11.4.0.106+cuda13" is (11, 4, 0, 106)."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def import_tensorrt() -> Any:
    """The module tensorrt, builder and parser included. Raises EnvironmentProblem: missing, without its libraries, too
    old."""
    return _import("tensorrt")


def import_runtime(*, version_compatible: bool) -> Any:
    """A module that opens plans: tensorrt or, where that cannot be imported and the plan is version-compatible,
    tensorrt_lean."""
    try:
        return _import("tensorrt")
    except EnvironmentProblem:
        if not version_compatible:
            raise
        try:
            return _import("tensorrt_lean")
        except EnvironmentProblem as error:
            raise EnvironmentProblem(
                f"neither tensorrt nor tensorrt_lean can be used: {error.problem}",
                f"pip install tensorrt-lean; {INSTALL}",
            ) from error


def _import(name: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"the module {error.name or name} is not installed", INSTALL) from error
    except (ImportError, OSError) as error:  # a shared library that the loader does not find
        raise EnvironmentProblem(
            f"{name} is installed and cannot be loaded: {str(error).splitlines()[0]}", INSTALL
        ) from error
    if version_of(module.__version__) < OLDEST:
        raise EnvironmentProblem(
            f"{name} is {module.__version__}, {dotted(OLDEST)} is the oldest that will do", INSTALL
        )
    return module


def require_gpu(cuda: Any) -> Gpu:
    """The GPU that CUDA computes on. Raises EnvironmentProblem: no driver, no GPU, one older than TensorRT supports."""
    gpu: Gpu = cuda.gpu()
    if gpu.compute_capability < OLDEST_GPU:
        raise EnvironmentProblem(
            f"TensorRT does not support {gpu}; the oldest is {dotted(OLDEST_GPU)}",
            f"--backend {default()}, or a newer GPU",
        )
    return gpu
