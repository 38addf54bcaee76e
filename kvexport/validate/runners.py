"""The backends that run an artifact on this machine."""

from __future__ import annotations

from pathlib import Path

from kvexport import backends
from kvexport.engine.engine import load
from kvexport.errors import ArtifactError, EnvironmentProblem, UsageError


def backends_here(path: Path) -> tuple[list[tuple[str, str | None]], dict[str, str]]:
    """The backends, each on all its devices, that run the artifact at `path` on this machine, and why each other one
    does not."""
    here, missing = [], {}
    for backend in backends.all_backends():
        for device in backend.devices:
            try:
                load(path, backend=backend.name, device=device, verify=False)
                here.append((backend.name, device))
            except (EnvironmentProblem, ArtifactError, UsageError) as error:
                missing[f"{backend.name} {device or ''}".rstrip()] = error.problem
    return here, missing
