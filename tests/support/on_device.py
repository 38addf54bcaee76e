"""The runtime's device path without a device: state in the CPU's memory, held by ONNX Runtime."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.backends.onnxruntime.model_sessions import DECODER, MERGE, TOP_LOGITS


def onto_device(engine: Any, *, graphs: bool = False) -> Any:
    """The engine, whose state from now on is where a device's would be. graphs: with the calls that capture and replay
    CUDA graphs, which are runs as all others here."""
    sessions = engine.model
    sessions.zeros = partial(DeviceArray, "cpu")
    sessions.graphs = {DECODER, MERGE, TOP_LOGITS} if graphs else set()
    return engine
