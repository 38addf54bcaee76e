"""What graphs can run on here: ONNX Runtime's providers, and the GPU as its driver shows it. Neither torch nor CUDA's
toolkit is asked."""

from __future__ import annotations

import contextlib
import ctypes
import io
from functools import cache
from typing import Any

from kvexport.errors import EnvironmentProblem

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Both packages give the same module; the one installed last is the one that is there.
INSTALL_GPU = "pip install 'kvexport[gpu]' && pip install --force-reinstall --no-deps onnxruntime-gpu"
INSTALL_CUDA = "pip install 'onnxruntime-gpu[cuda,cudnn]'"


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
        found.append((driver, "a machine with an NVIDIA GPU and its driver (in a container: docker run --gpus all)"))
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
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        return f"the NVIDIA driver cannot be used: {(name.value or b'error %d' % code).decode()}"
    return "" if count.value else "the NVIDIA driver shows no GPU"


def _build_info(onnxruntime: Any) -> str:
    try:
        return str(onnxruntime.get_build_info())
    except AttributeError:
        return ""
