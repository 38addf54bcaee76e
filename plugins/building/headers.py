"""The folders of the headers of ONNX Runtime, TensorRT and CUDA, and a way to fetch those of ONNX Runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from .tools import CACHE, PLUGINS, Missing

FETCHED = CACHE / "headers"
BROUGHT = PLUGINS / "third_party" / "onnxruntime"  # part of source distributions
ONNXRUNTIME_FOLDERS = ("include/onnxruntime", "include/onnxruntime/core/session")


class Place(NamedTuple):
    """A header and the folders in which it may be.

    Attributes:
        header: The file's name.
        variable: The environment variable that names its folder.
        folders: The folders to search if the variable is not set.
        missing: The message if it is not found.
    """

    header: str
    variable: str
    folders: tuple[Path, ...]
    missing: str


PLACES = {
    "onnxruntime": Place(
        "onnxruntime_cxx_api.h",
        "ONNXRUNTIME_INCLUDE_DIR",
        (
            BROUGHT,
            FETCHED / "usr/include/onnxruntime",
            *(Path(root, folder) for folder in ONNXRUNTIME_FOLDERS for root in ("/usr", "/usr/local")),
        ),
        "ONNX Runtime's C headers were not found (ONNXRUNTIME_INCLUDE_DIR=DIR, with DIR the folder include of a "
        "release of ONNX Runtime; in a checkout on Debian: python plugins/build.py --fetch-headers)",
    ),
    "tensorrt": Place(
        "NvInferRuntime.h",
        "TENSORRT_INCLUDE_DIR",
        (
            CACHE / "TensorRT/include",
            *(Path(f"/usr/include/{machine}-linux-gnu") for machine in ("x86_64", "aarch64")),
            Path("/usr/include"),
            Path("/usr/local/tensorrt/include"),
        ),
        "TensorRT's headers were not found: "
        "git clone --depth 1 --branch v11.1 https://github.com/NVIDIA/TensorRT build-cache/TensorRT",
    ),
    "cuda": Place(
        "cuda_runtime_api.h",
        "CUDA_INCLUDE_DIR",
        (Path("/usr/local/cuda/include"), Path("/usr/include")),
        "CUDA's headers were not found: install the CUDA toolkit",
    ),
}


def find(name: str, *, fetch: bool = False) -> Path:
    """Return the folder of these headers: that of the environment variable, or the first that has the header.

    Args:
        name: A key of PLACES.
        fetch: Whether to fetch ONNX Runtime's headers as a Debian package if there are none.

    Raises:
        Missing: The headers were not found.
    """
    place = PLACES[name]
    configured = os.environ.get(place.variable)
    nvcc = shutil.which("nvcc") if name == "cuda" else None
    folders = ((Path(nvcc).resolve().parent.parent / "include"), *place.folders) if nvcc else place.folders
    for folder in (Path(configured),) if configured else folders:
        if (folder / place.header).is_file():
            return folder
    if configured:
        raise Missing(f"{place.variable}={configured} holds no {place.header}")
    if fetch and name == "onnxruntime":
        _fetch_onnxruntime()
        return find(name)
    raise Missing(place.missing)


def _fetch_onnxruntime() -> None:
    """Unpack Debian's package under build-cache; nothing is installed."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Missing(
            "ONNX Runtime's C headers were not found, and this is not Debian, whose package libonnxruntime-dev has them"
        )
    FETCHED.mkdir(parents=True, exist_ok=True)
    command = ["sh", str(PLUGINS / "building" / "fetch_headers.sh"), str(FETCHED)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Missing(f"Debian's libonnxruntime-dev could not be fetched: {reason}")
