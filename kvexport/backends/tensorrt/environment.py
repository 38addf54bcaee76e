"""Checks of TensorRT and the GPU before TensorRT is used, because TensorRT crashes without a GPU driver."""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.backends.sections import default
from kvexport.errors import EnvironmentProblem
from kvexport.machine import require_memory

OLDEST = (11,)  # the oldest TensorRT that works: strongly typed networks only, int64, the operators of opset 23
OLDEST_GPU = (7, 5)  # the oldest GPU that every TensorRT 11 supports
INSTALL = "pip install 'kvexport[tensorrt]', or use the image of docker/tensorrt.Dockerfile"
JETSON = Path("/etc/nv_tegra_release")  # a file that JetPack puts on every Jetson
INSTALL_JETSON = "JetPack 7.2.2 or newer, which has TensorRT 11 (JetPack 6 has TensorRT 10), or another --backend"
PACK = "--set weights.bits=4 --set weights.group=128"
REBUILD = "kvexport build --from ARTIFACT --backend tensorrt, on the machine that is to run it"


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: tuple[int, int]  # major and minor number

    def __str__(self) -> str:
        return f"{self.name} (compute capability {dotted(self.compute_capability)})"


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def version_of(text: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def install() -> str:
    return INSTALL_JETSON if JETSON.exists() else INSTALL


def require_build_memory(weight_bytes: int) -> None:
    if JETSON.exists():
        require_memory(2 * weight_bytes, "an engine with its plan", f"{PACK}, at the export on another machine")


def import_tensorrt() -> Any:
    try:
        module = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"the module {error.name or 'tensorrt'} is not installed", install()) from error
    except (ImportError, OSError) as error:  # the loader does not find a shared library
        raise EnvironmentProblem(
            f"tensorrt is installed but cannot be loaded: {str(error).splitlines()[0]}", install()
        ) from error
    if version_of(module.__version__) < OLDEST:
        raise EnvironmentProblem(
            f"tensorrt is {module.__version__}, which is too old: {dotted(OLDEST)} is the oldest supported version",
            install(),
        )
    return module


def require_gpu(cuda: Any) -> Gpu:
    gpu: Gpu = cuda.gpu()
    if gpu.compute_capability < OLDEST_GPU:
        raise EnvironmentProblem(
            f"TensorRT does not support {gpu}; the oldest is {dotted(OLDEST_GPU)}",
            f"--backend {default()}, or a newer GPU",
        )
    return gpu
