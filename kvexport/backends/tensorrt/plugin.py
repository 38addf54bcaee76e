"""The plugin library: VoteAttention and MergeCache as TensorRT plugins, where it was built.

Without it, or for a node it does not take, an engine is built from the function that the graph carries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvexport.errors import EnvironmentProblem
from kvexport.paths import checkout, native_folder
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION

NAME = "libkvexport_tensorrt.so"
VARIABLE = "KVEXPORT_TENSORRT_PLUGIN"
OPERATORS = ("VoteAttention", "MergeCache")
VERSION = "1"
NAMESPACE = "kvexport"
BUILD = (
    "python plugins/build.py tensorrt --capabilities 90, with the GPU's compute capability "
    "(docs/reference/tensorrt-plugins.md)"
)


def library() -> Path | None:
    """The library to register, None where there is none. The variable KVEXPORT_TENSORRT_PLUGIN names another one, or is
    ``off``."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "off":
        return None
    path = Path(asked) if asked else native_folder() / NAME
    return path if path.is_file() else None


def why_no_library() -> tuple[str, str]:
    """Why there is none to register, and the line that changes it."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        return (
            f"switched off by {VARIABLE}" if asked == "off" else f"{VARIABLE}={asked} is no file",
            f"unset {VARIABLE}",
        )
    return "the TensorRT plugins are not built", BUILD


def what_building_lacks() -> str | None:
    """What `BUILD` would miss here (TensorRT's headers, CUDA's, nvcc), with the line that gets it; None where nothing
    is missing, or there is no checkout to build from."""
    root = checkout()
    if root is None:
        return None
    command = [sys.executable, str(root / "plugins" / "build.py"), "tensorrt", "--check"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()
    return said.partition(" was not built: ")[2] or None


def register(trt: Any) -> Path | None:
    """Register the library with TensorRT's own registry; its path, None where the plugins were there already (in a
    plan, or registered before). Raises EnvironmentProblem: no library, one that TensorRT refuses, plugins of another
    version."""
    registry = trt.get_plugin_registry()
    if not _missing(registry):
        return None
    path = library()
    if path is None:
        raise EnvironmentProblem(*why_no_library())
    # Failing is None without an exception, and so is loading twice: what counts is what the registry then has.
    handle = registry.load_library(str(path.resolve()))
    if missing := _missing(registry):
        others = sorted(
            {
                f"{c.name} {c.plugin_version}"
                for c in registry.all_creators
                if c.name in missing and c.plugin_namespace == NAMESPACE
            }
        )
        if others:
            found = f"it has {', '.join(others)}, this kvexport needs version {VERSION}"
        else:
            found = "TensorRT refused it" if handle is None else f"it has no {' and no '.join(missing)}"
        raise EnvironmentProblem(f"{path} gives no plugins that can be used: {found}", f"{BUILD}; or {VARIABLE}=off")
    return path


def _missing(registry: Any) -> list[str]:
    return [name for name in OPERATORS if registry.get_creator(name, VERSION, NAMESPACE) is None]


def refusal(trt: Any, node: Any) -> str | None:
    """Why the plugin of `node` (an onnx.NodeProto) would not take it, None where it does; the registered creator is
    asked for an instance with the fields that TensorRT's parser makes of the node's attributes."""
    operator = {"VoteAttention": VOTE_ATTENTION, "MergeCache": MERGE_CACHE}[node.op_type]
    if len(node.input) > len(operator.inputs):
        return f"the plugin does not take a method that keeps state of its own, {node.input[-1].rpartition('.')[2]}"
    creator = trt.get_plugin_registry().get_creator(node.op_type, VERSION, NAMESPACE)
    fields = [field for attribute in node.attribute if (field := _field(trt, attribute)) is not None]
    if (
        creator.create_plugin(node.name or node.op_type, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        is None
    ):
        if node.op_type == "MergeCache" and not any(a.name == "select" for a in node.attribute):
            return "the plugin does not take a method without a merge policy"
        return f"the plugin does not take node {node.name}"
    return None


def _field(trt: Any, attribute: Any) -> Any:
    """An attribute as the parser hands it over: float32, int32, text."""
    import numpy as np
    from onnx import AttributeProto

    kind, types = attribute.type, trt.PluginFieldType
    if attribute.name in ("plugin_version", "plugin_namespace"):
        return None
    if kind == AttributeProto.STRING:
        return trt.PluginField(attribute.name, np.frombuffer(attribute.s, dtype=np.int8), types.CHAR)
    if kind in (AttributeProto.FLOAT, AttributeProto.FLOATS):
        numbers = [attribute.f] if kind == AttributeProto.FLOAT else list(attribute.floats)
        return trt.PluginField(attribute.name, np.array(numbers, dtype=np.float32), types.FLOAT32)
    numbers = [attribute.i] if kind == AttributeProto.INT else list(attribute.ints)
    return trt.PluginField(attribute.name, np.array(numbers, dtype=np.int32), types.INT32)
