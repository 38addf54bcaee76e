"""The CUDA libraries of kvexport; `get_library_path` returns the one for ONNX Runtime that this machine's driver runs.

Each folder `cudaN` beside this file has libraries that CUDA N built. A driver runs libraries of its own major version
of CUDA, and of earlier ones.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

FOLDER = Path(__file__).parent


def get_library_path() -> str:
    """Return the path of the operators for ONNX Runtime's CUDA provider."""
    return str(_newest("libkvexport_onnxruntime_cuda.so"))


def get_tensorrt_library_path() -> str:
    """Return the path of the TensorRT plugins."""
    return str(_newest("libkvexport_tensorrt.so"))


def driver_major() -> int | None:
    """Return the major version of CUDA that the NVIDIA driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if status else version.value // 1000


def _newest(name: str) -> Path:
    """Return the library of the newest CUDA that the driver runs; without a driver, of the newest CUDA.

    If this distribution was packed without the library, the returned path does not exist.

    Raises:
        FileNotFoundError: The driver is too old for every version of the library.
    """
    majors = sorted(int(path.parent.name.removeprefix("cuda")) for path in FOLDER.glob(f"cuda*/{name}"))
    if not majors:
        return FOLDER / name
    driver = driver_major()
    fitting = [major for major in majors if driver is None or major <= driver]
    if not fitting:
        built = ", ".join(map(str, majors))
        raise FileNotFoundError(f"{name} is built for CUDA {built}, and the driver supports CUDA up to {driver}")
    return FOLDER / f"cuda{fitting[-1]}" / name
