"""Builds the native operators when the package is installed, where that can be done; the package works either way."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeOperators(BuildHookInterface):  # type: ignore[misc]
    """Runs plugins/build.py. KVEXPORT_NATIVE=off skips it, KVEXPORT_NATIVE=cuda builds those for CUDA too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """One line where something is missing, never an error."""
        source = Path(self.root) / "plugins" / "build.py"
        if self.target_name != "wheel" or os.environ.get("KVEXPORT_NATIVE") == "off" or not source.is_file():
            return
        spec = importlib.util.spec_from_file_location("kvexport_plugins_build", source)
        assert spec is not None and spec.loader is not None
        plugins = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(plugins)
        try:
            headers = plugins.find_headers()
            library = plugins.build(headers)
        except plugins.Missing as error:
            self.app.display_warning(
                f"the native operators were not built, and graphs run from their functions: {error}"
            )
            return
        self.app.display_info(f"built {library.name}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if os.environ.get("KVEXPORT_NATIVE") != "cuda":
            return
        try:
            self.app.display_info(f"built {plugins.build_cuda(headers).name}")
        except plugins.Missing as error:
            self.app.display_warning(f"the native operators for CUDA were not built: {error}")
