"""The kernels' library, compiled ahead on a machine with nvcc and without a GPU.

``python -m tools.gpu_check --prebuild 90`` writes it to build-cache/prebuilt under a digest of its sources, where the
part `build` finds it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.building import make, resources
from plugins.building.targets import DEVICE_FLAGS, KERNEL_FILES
from plugins.building.tools import CACHE, PLUGINS, publish

FOLDER = CACHE / "prebuilt"


def digest() -> str:
    """Return a digest, in hexadecimal, of the kernels' sources and of the way they are compiled."""
    sources = hashlib.sha256(json.dumps(DEVICE_FLAGS).encode())
    for path in sorted({path for pattern in KERNEL_FILES for path in PLUGINS.glob(pattern)}):
        sources.update(str(path.relative_to(PLUGINS)).encode() + b"\0" + path.read_bytes() + b"\0")
    return sources.hexdigest()[:16]


def library(capability: str, folder: Path = FOLDER) -> Path:
    """Return the path of the library of these sources for a compute capability, whether it exists or not."""
    return folder / f"libkvexport_cuda-sm_{capability}-{digest()}.so"


def write(capabilities: Sequence[str], folder: Path = FOLDER) -> list[Path]:
    """Compile for each capability, and write the compiler's report next to the library."""
    libraries = []
    for capability in capabilities:
        objects, report = make.compile_kernels([capability])
        path = make.link_device("cuda", objects, [capability], library(capability, folder))
        text = json.dumps({"compiler": resources.compiler_version(), "kernels": report})
        path.with_suffix(".json").write_text(text + "\n")
        libraries.append(path)
    return libraries


def take(capability: str, to: Path, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Copy the library of these sources to `to`; return the compiler's report, or None if there is no library."""
    compiled = library(capability, folder)
    if not compiled.is_file():
        return None
    to.parent.mkdir(parents=True, exist_ok=True)
    copied = to.with_suffix(".copied")
    shutil.copyfile(compiled, copied)
    publish(copied, to)
    return {"prebuilt": compiled.name} | json.loads(compiled.with_suffix(".json").read_text())
