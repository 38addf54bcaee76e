"""The shared library with the TensorRT plugins of kvexport's operators VoteAttention and MergeCache.

Without the library, or for a node that it does not support, an engine is built from the node's ONNX function.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from kvexport.backends import libraries
from kvexport.errors import EnvironmentProblem
from kvexport.paths import checkout
from kvexport.schema.state import STATE_NAMES

NAME = "libkvexport_tensorrt.so"
VARIABLE = "KVEXPORT_TENSORRT_PLUGIN"
OPERATORS = ("VoteAttention", "MergeCache")
VERSION = "1"
NAMESPACE = "kvexport"
BUILD = (
    "python plugins/build.py tensorrt --capabilities 90 in a checkout of kvexport, with the GPU's compute capability "
    "(kvexport docs reference/tensorrt-plugins)"
)


def library() -> Path | None:
    return libraries.find(VARIABLE, NAME, "tensorrt")


def why_no_library() -> tuple[str, str]:
    return libraries.why_none(VARIABLE, "the TensorRT plugins", BUILD)


def what_building_lacks() -> str | None:
    root = checkout()
    if root is None:
        return None
    command = [sys.executable, str(root / "plugins" / "build.py"), "tensorrt", "--check"]
    message = subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()
    return message.partition(" was not built: ")[2] or None


def register(trt: Any) -> Path | None:
    registry = trt.get_plugin_registry()
    if not _missing(registry):
        return None
    path = library()
    if path is None:
        raise EnvironmentProblem(*why_no_library())
    # load_library returns None, without an exception, both if it fails and if the library is already loaded. The
    # plugins in the registry decide.
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
            reason = f"it has {', '.join(others)}, this kvexport needs version {VERSION}"
        else:
            reason = "TensorRT refused it" if handle is None else f"it has no {' and no '.join(missing)}"
        raise EnvironmentProblem(f"{path} provides no usable plugins: {reason}", f"{BUILD}; or {VARIABLE}=off")
    return path


def _missing(registry: Any) -> list[str]:
    return [name for name in OPERATORS if registry.get_creator(name, VERSION, NAMESPACE) is None]


def refusal(trt: Any, node: Any) -> str | None:
    """Return why kvexport's TensorRT plugin cannot run an ONNX node; None if it can.

    The registered creator is asked for a plugin with the fields that TensorRT's parser would derive from the node's
    attributes. The creator returns no plugin if the plugin cannot run the node.
    """
    if node.op_type in OPERATORS:
        present = [name.rpartition(".")[2] for name in node.output[node.op_type == "VoteAttention" :]]
        if extra := [name for name in present if name not in STATE_NAMES]:
            return f"the plugin does not take a method that keeps extra state, {extra[-1]}"
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
