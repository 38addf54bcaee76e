"""Hatch's hooks of kvexport-cuda: the libraries of KVEXPORT_CUDA_LIBRARIES, a folder with a folder cudaN for CUDA N.

`python plugins/build.py onnxruntime-cuda --out FOLDER/cudaN` compiles the libraries of the CUDA version N that is
installed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "KVEXPORT_CUDA_LIBRARIES"


class Libraries(BuildHookInterface):  # type: ignore[misc]
    """The hook that adds the libraries to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Find the libraries and tag the wheel with the platform that all of them need.

        Raises:
            RuntimeError: No library was found.
        """
        folder = Path(os.environ.get(VARIABLE, ""))
        libraries = sorted(folder.glob("cuda*/libkvexport_*.so")) if VARIABLE in os.environ else []
        if not libraries:
            raise RuntimeError(
                f"{VARIABLE}={folder} has no libraries cudaN/libkvexport_*.so: "
                f"python plugins/build.py onnxruntime-cuda --out {folder}/cudaN"
            )
        own = _hooks_of_kvexport(Path(self.root))
        everything = b"\0".join(path.read_bytes() for path in libraries)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{own.platform_tag(everything, platform.machine())}"
        build_data["force_include"].update({str(p): f"kvexport_cuda/{p.parent.name}/{p.name}" for p in libraries})


class Metadata(MetadataHookInterface):  # type: ignore[misc]
    """The hook that makes the kvexport of the same version a dependency, since the kernels implement its operators."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependency of kvexport-cuda: kvexport of the same version."""
        root = Path(self.root)
        metadata["dependencies"] = [f"kvexport=={_hooks_of_kvexport(root).version_of(root / '../..')}"]


def _hooks_of_kvexport(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("kvexport_hatch_build", root / "../../hatch_build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
