"""The switch that turns off the usage reports which kvexport's dependencies send (SECURITY.md lists them)."""

from __future__ import annotations

import os
import sys

SWITCH = "KVEXPORT_TELEMETRY"  # 1 leaves every dependency's own setting as it is
QUIET = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "1",
}


def silence_dependencies() -> None:
    """Turn off usage reports of dependencies by the environment variables QUIET, unless the variable SWITCH is 1.

    Variables that the user has set stay as they are. Child processes inherit the variables.
    """
    if os.environ.get(SWITCH) == "1":
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # ONNX Runtime reads its variable once, while it is imported. A program that imported it first has a device id and
    # a queue of events already; this call keeps the events from being sent.
    if (runtime := sys.modules.get("onnxruntime")) and hasattr(runtime, "disable_telemetry_events"):
        runtime.disable_telemetry_events()
