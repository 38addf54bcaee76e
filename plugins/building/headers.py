"""The folders of the headers of ONNX Runtime, which are part of the checkout, and of TensorRT and CUDA."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from .tools import CACHE, PLUGINS, Missing


class Place(NamedTuple):
    """A header and the folders in which it may be.

    Attributes:
        header: The file's name.
        variable: The environment variable that names its folder; "" if there is none.
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
        "",
        (PLUGINS / "third_party" / "onnxruntime",),
        "the checkout lacks plugins/third_party/onnxruntime: git checkout plugins/third_party",
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


def find(name: str) -> Path:
    """Return the folder of these headers: that of the environment variable, or the first that has the header.

    Args:
        name: A key of PLACES.

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
    raise Missing(place.missing)
