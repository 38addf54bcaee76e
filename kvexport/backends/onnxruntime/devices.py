"""What graphs can run on here: ONNX Runtime's providers, and the GPU as its driver shows it. Neither torch nor CUDA's
toolkit is asked."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from functools import cache
from itertools import permutations
from typing import Any

from kvexport.errors import EnvironmentProblem

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Both packages give the same module; the one installed last is the one that is there.
INSTALL_GPU = "pip install 'kvexport[gpu]' && pip install --force-reinstall --no-deps onnxruntime-gpu"
INSTALL_CUDA = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
A_GPU = "a machine with an NVIDIA GPU and its driver (in a container: docker run --gpus all)"
DRIVER = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def require_device(device: str) -> None:
    """Raises EnvironmentProblem, with all that is missing and the first line that mends it, where graphs cannot run on
    `device` here."""
    found = problems(device)
    if found:
        raise EnvironmentProblem(
            f"nothing can run on {device} here: {'; '.join(problem for problem, _ in found)}", found[0][1]
        )


def problems(device: str) -> list[tuple[str, str]]:
    """Why graphs cannot run on `device` here, and what mends it; empty where they can."""
    try:
        import onnxruntime
    except Exception as error:  # compiled modules fail in ways of their own
        line = (str(error) or type(error).__name__).splitlines()[0]
        return [
            (f"onnxruntime cannot be imported: {line}", INSTALL_GPU if device == "cuda" else "pip install onnxruntime")
        ]
    if device == "cpu":
        return []
    found = []
    available = providers(onnxruntime)
    driver = driver_problem()
    # A provider that is a library of its own is there only where it finds a GPU.
    if PROVIDERS[device] not in available and not (driver and ", cuda-plugin-ep=" in _build_info(onnxruntime)):
        found.append(
            (f"onnxruntime {onnxruntime.__version__} has no CUDA provider, only {', '.join(available)}", INSTALL_GPU)
        )
    if driver:
        found.append((driver, A_GPU))
    return found


def providers(onnxruntime: Any) -> list[str]:
    """ONNX Runtime's providers, those of registered libraries included."""
    found = list(onnxruntime.get_available_providers())
    with contextlib.suppress(Exception):  # releases before 1.22 have no such function
        found += [device.ep_name for device in onnxruntime.get_ep_devices() if device.ep_name not in found]
    return found


def load_cuda_libraries(onnxruntime: Any) -> None:
    """CUDA and cuDNN out of NVIDIA's Python packages, where they are installed; what the loader finds by itself needs
    no help."""
    if getattr(onnxruntime, "cuda_version", "") and hasattr(onnxruntime, "preload_dlls"):
        # It prints what it does not find, which a session that starts does not need.
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()


@cache
def driver_problem() -> str:
    """Why CUDA's driver shows no GPU; "" where it shows one."""
    try:
        return "" if gpu_count() else "the NVIDIA driver shows no GPU"
    except EnvironmentProblem as error:
        return error.problem


def drive(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver. Raises EnvironmentProblem with what it answers, and where there is none."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise EnvironmentProblem(f"there is no NVIDIA driver ({DRIVER} cannot be loaded)", A_GPU) from error
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        answer = (text.value or b"error %d" % code).decode()
        what = "" if name in ("cuInit", "cuDeviceGetCount") else f" for {name.removesuffix('_v2')}"
        raise EnvironmentProblem(f"the NVIDIA driver cannot be used{what}: {answer}", "kvexport doctor")


def gpu_count() -> int:
    """How many GPUs the driver shows to this process."""
    count = ctypes.c_int()
    drive("cuInit", 0)
    drive("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def use_first_gpu() -> None:
    """The driver's calls of this thread are of the first GPU from now on, in the context that ONNX Runtime uses."""
    drive("cuCtxSetCurrent", _first_context())


@cache
def _first_context() -> Any:
    context = ctypes.c_void_p()
    drive("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    return context


def rank_problems(ranks: int) -> list[tuple[str, str]]:
    """Why the first GPUs cannot be as many ranks, and what mends it; empty where they can."""
    if (count := gpu_count()) < ranks:
        return [
            (
                f"{ranks} ranks take {ranks} GPUs, and the driver shows {count}",
                f"--set backend.tensor_parallel={count}, or more GPUs in {VISIBLE} (in a container: --gpus all)",
            )
        ]
    for one, other in permutations(range(ranks), 2):
        reached = ctypes.c_int()
        drive("cuDeviceCanAccessPeer", ctypes.byref(reached), one, other)
        if not reached.value:
            return [
                (
                    f"GPU {one} does not reach the memory of GPU {other}, neither by NVLink nor over PCIe",
                    f"choose GPUs that do by {VISIBLE}: nvidia-smi topo -p2p r shows them",
                )
            ]
    return []


def most_ranks(limit: int) -> tuple[int, str]:
    """How many of the first GPUs, `limit` at the most, can be the ranks of one model; and why no more than one."""
    try:
        most = min(limit, gpu_count())
        while most > 1 and rank_problems(most):
            most -= 1
        return (most, "") if most > 1 else (1, rank_problems(2)[0][0])
    except EnvironmentProblem as error:
        return 1, error.problem


def visible_from(first: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process that has this one's GPU number `first` as its own first one, and then the
    others."""
    shown = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")]
    names = (shown if VISIBLE in os.environ else [str(i) for i in range(gpu_count())])[: gpu_count()]
    return ",".join([names[first], *(name for i, name in enumerate(names) if i != first)])


def _build_info(onnxruntime: Any) -> str:
    try:
        return str(onnxruntime.get_build_info())
    except AttributeError:
        return ""
