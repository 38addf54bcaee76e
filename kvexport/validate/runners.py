"""Search for the backends (ONNX Runtime, TensorRT) that can run an artifact on this machine."""

from __future__ import annotations

from pathlib import Path

from kvexport import backends
from kvexport.engine.load import load
from kvexport.errors import ArtifactError, EnvironmentProblem, UsageError


def backends_here(path: Path) -> tuple[list[tuple[str, str | None]], dict[str, str]]:
    usable, missing = [], {}
    for backend in backends.all_backends():
        for device in backend.devices:
            try:
                load(path, backend=backend.name, device=device, verify=False)
                usable.append((backend.name, device))
            except (EnvironmentProblem, ArtifactError, UsageError) as error:
                missing[f"{backend.name} {device or ''}".rstrip()] = error.problem
    return usable, missing
