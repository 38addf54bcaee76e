"""The runtime's device path without a device: the state is in the CPU's memory, held by ONNX Runtime."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.backends.onnxruntime.model_sessions import DECODER, MERGE, TOP_LOGITS


def onto_device(engine: Any, *, graphs: bool = False) -> Any:
    """Return the engine with its state held as on a device.

    Args:
        engine: The engine, which is changed.
        graphs: Whether to take the calls that capture and replay CUDA graphs. Here they run like all other calls.
    """
    sessions = engine.model
    sessions.zeros = partial(DeviceArray, "cpu")
    sessions.graphs = {DECODER, MERGE, TOP_LOGITS} if graphs else set()
    return engine
