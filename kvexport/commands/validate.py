"""What `kvexport validate` runs: one comparison, or one for every backend that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvexport.artifact.publish import load_manifest
from kvexport.backends.tensorrt.rebuild import rebuild
from kvexport.errors import EnvironmentProblem
from kvexport.terminal import Progress
from kvexport.validate.layers import first_layers
from kvexport.validate.runner import ValidationResult, require_packages, validate_artifact
from kvexport.validate.runners import backends_here

Show = Callable[[str, int | None], Progress]


def validate_backends(
    artifact: Path, backend: str | None, layers: int | None, checkpoint: str | None, progress: Show, **asked: Any
) -> tuple[list[ValidationResult], dict[str, str]]:
    """`validate_artifact(artifact, **asked)` with one backend, or with "all" that there are; and why each other one was
    not compared.

    layers: hold the first so many alone, in an artifact made for this. Errors: those of `validate_artifact`,
    `first_layers` and, where TensorRT is asked for by name, `rebuild`.
    """
    if layers is None:
        return _compare(artifact, backend, progress, checkpoint=checkpoint, **asked)
    require_packages()
    total = load_manifest(artifact)["model"]["layers"]
    with first_layers(artifact, layers, checkpoint, progress) as held:
        name = backend or load_manifest(held)["recipe"]["backend"]["name"]
        lacks = _without_engines(held, name, progress)
        results, missing = _compare(held, backend, progress, **asked)
    shown = [replace(result, artifact=str(artifact), layers=(layers, total)) for result in results]
    return shown, {**missing, **lacks}


def _compare(
    artifact: Path, backend: str | None, progress: Show, **asked: Any
) -> tuple[list[ValidationResult], dict[str, str]]:
    backends: list[tuple[str | None, str | None]] = [(backend, None)]
    missing: dict[str, str] = {}
    if backend == "all":
        backends[:], missing = backends_here(artifact)
    results = [
        validate_artifact(artifact, **asked, backend=name, device=device, progress=progress)
        for name, device in backends
    ]
    return results, missing


def _without_engines(held: Path, backend: str, progress: Show) -> dict[str, str]:
    """Add TensorRT's engines where they are wanted; why there are none, where any backend will do."""
    if backend not in ("tensorrt", "all"):
        return {}
    try:
        rebuild(held, overrides=["backend.name=tensorrt"], progress=progress)
    except EnvironmentProblem as error:
        if backend == "tensorrt":
            raise
        return {"tensorrt": error.problem}
    return {}
