"""The plugin half of `fake_tensorrt`: a registry whose libraries are text files with a list of plugins."""

from enum import IntEnum
from pathlib import Path
from typing import Any

from kvexport.backends.tensorrt.plugin import OPERATORS

LIBRARY = "\n".join(["plugins", *(f"{name} 1" for name in OPERATORS)])
"""The text of a library that has all plugins of kvexport."""
PluginFieldType = IntEnum("PluginFieldType", "FLOAT32 INT32 CHAR")
TensorRTPhase = IntEnum("TensorRTPhase", "BUILD RUNTIME")


class PluginField:
    __slots__ = ("data", "name", "type")

    def __init__(self, name: str, data: Any, type: Any) -> None:
        self.name, self.data, self.type = name, data, type


def PluginFieldCollection(fields: list[PluginField]) -> list[PluginField]:
    return fields


class IPluginCreatorV3One:
    __slots__ = ("name", "plugin_namespace", "plugin_version")
    refused: str = ""  # the name of the plugin that cannot be created
    fields: dict[str, Any] = {}  # noqa: RUF012  # of the last one

    def __init__(self, name: str, version: str) -> None:
        self.name, self.plugin_version, self.plugin_namespace = name, version, "kvexport"

    def create_plugin(self, name: str, field_collection: list[PluginField], phase: Any) -> object | None:
        IPluginCreatorV3One.fields = {f.name: (f.type.name, f.data.tolist()) for f in field_collection}
        return None if self.name == self.refused else object()


class IPluginRegistry:
    __slots__ = ("all_creators", "loaded")

    def __init__(self) -> None:
        self.all_creators: list[IPluginCreatorV3One] = []
        self.loaded: list[str] = []

    def load_library(self, plugin_path: str) -> object | None:
        """Load a library: a file that lists the names and versions of plugins."""
        self.loaded.append(plugin_path)
        text = Path(plugin_path).read_text()
        if not text.startswith("plugins"):
            return None
        self.all_creators += [IPluginCreatorV3One(*line.split()) for line in text.splitlines()[1:]]
        return object()

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> IPluginCreatorV3One | None:
        creators = (
            c
            for c in self.all_creators
            if (c.name, c.plugin_version, c.plugin_namespace) == (type, version, plugin_namespace)
        )
        return next(creators, None)


_registry = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    return _registry


def forget_plugins() -> None:
    global _registry
    _registry = IPluginRegistry()
