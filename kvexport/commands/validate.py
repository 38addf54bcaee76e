"""The command `kvexport validate`: one comparison with PyTorch, or one for every backend that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvexport.backends.sections import names
from kvexport.commands.options import ArtifactArgument, JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import EnvironmentProblem, MismatchError

if TYPE_CHECKING:
    from kvexport.terminal import Progress
    from kvexport.validate.result import ValidationResult

Show = Callable[[str, "int | None"], "Progress"]


def validate(
    artifact: ArtifactArgument,
    length: Annotated[
        int | None, typer.Option(min=2, help="The tokens of the longest sequence. [default: past the capacity]")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="The number of sequences, each shorter than the last. [default: 3 or fewer]"),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder of the weights. [default: the recipe's]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the random tokens.")] = 0,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Compare only the first N layers, built for this.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(names())}, or all that this machine has.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare an artifact with PyTorch, step by step."""
    from kvexport.terminal import show
    from kvexport.validate.sections import sections as sections_of

    settings: dict[str, Any] = {"length": length, "batch": batch, "seed": seed}
    results, missing = validate_backends(artifact, backend, layers, checkpoint, show, **settings)
    for name, why in missing.items():
        typer.echo(f"not compared with {name}: {why}", err=True)
    for result in results:
        if result.warning:
            typer.echo(f"warning: {result.warning}", err=True)
    problem = next((result.problem for result in results if not result.passed), "")
    sections = [section for result in results for section in sections_of(result)]
    print_result(
        as_json, lambda: [r.to_json() for r in results] if backend == "all" else results[0].to_json(), lambda: sections
    )
    if problem:
        raise MismatchError(
            problem, "KVEXPORT_OPERATORS=off shows whether native operators differ; report it with validate --json"
        )


def validate_backends(
    artifact: Path, backend: str | None, layers: int | None, checkpoint: str | None, progress: Show, **settings: Any
) -> tuple[list[ValidationResult], dict[str, str]]:
    """Compare an artifact with PyTorch on one backend, or on all backends of this machine."""
    from kvexport.artifact.reading import load_manifest
    from kvexport.packages import require
    from kvexport.validate.layers import first_layers

    if layers is None:
        return _compare(artifact, backend, progress, checkpoint=checkpoint, **settings)
    require("validate")
    total = load_manifest(artifact).model.layers
    with first_layers(artifact, layers, checkpoint, progress) as shortened:
        name = backend or load_manifest(shortened).recipe.backend.name
        lacks = _prepare(shortened, name, progress)
        results, missing = _compare(shortened, backend, progress, **settings)
    shown = [replace(result, artifact=str(artifact), layers=(layers, total)) for result in results]
    return shown, {**missing, **lacks}


def _compare(
    artifact: Path, backend: str | None, progress: Show, **settings: Any
) -> tuple[list[ValidationResult], dict[str, str]]:
    from kvexport.validate.runner import validate_artifact
    from kvexport.validate.runners import backends_here

    backends: list[tuple[str | None, str | None]] = [(backend, None)]
    missing: dict[str, str] = {}
    if backend == "all":
        backends[:], missing = backends_here(artifact)
    results = [
        validate_artifact(artifact, **settings, backend=name, device=device, progress=progress)
        for name, device in backends
    ]
    return results, missing


def _prepare(shortened: Path, backend: str, progress: Show) -> dict[str, str]:
    """Build the files that backends need (such as TensorRT engines) for an artifact that has only ONNX graphs."""
    from kvexport import backends
    from kvexport.export.rebuild import rebuild

    lacks = {}
    for candidate in backends.all_backends() if backend == "all" else [backends.get(backend)]:
        if not candidate.prepared:
            continue
        try:
            rebuild(shortened, overrides=[f"backend.name={candidate.name}"], progress=progress)
        except EnvironmentProblem as error:
            if backend != "all":
                raise
            lacks[candidate.name] = error.problem
    return lacks
