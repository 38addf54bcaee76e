"""Builds the native operators when the package is installed, where that can be done; the package works either way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WITHOUT = {"onnxruntime": "graphs run from their functions", "onnxruntime-cuda": "those for the CPU are there"}


class NativeOperators(BuildHookInterface):  # type: ignore[misc]
    """Runs plugins/build.py. KVEXPORT_NATIVE=off skips it, KVEXPORT_NATIVE=cuda builds those for CUDA too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """One line where something is missing, never an error."""
        script = Path(self.root) / "plugins" / "build.py"
        if self.target_name != "wheel" or os.environ.get("KVEXPORT_NATIVE") == "off" or not script.is_file():
            return
        if not self._builds(script, "onnxruntime"):
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if os.environ.get("KVEXPORT_NATIVE") == "cuda":
            self._builds(script, "onnxruntime-cuda")

    def _builds(self, script: Path, target: str) -> bool:
        done = subprocess.run([sys.executable, str(script), target], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            self.app.display_info(f"built {Path(done.stdout.strip()).name}")
            return True
        self.app.display_warning(f"{done.stderr.strip()}; {WITHOUT[target]}")
        return False
