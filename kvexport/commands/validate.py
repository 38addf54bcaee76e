"""The command `kvexport validate`: a comparison of an artifact with PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvexport.backends.sections import names
from kvexport.commands.options import ArtifactArgument, JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import MismatchError

if TYPE_CHECKING:
    from kvexport.validate.result import ValidationResult


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
        str | None, typer.Option(metavar="NAME", help=f"{' or '.join(names())}. [default: the recipe's]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare an artifact with PyTorch, step by step."""
    from kvexport import backends
    from kvexport.artifact.reading import load_manifest
    from kvexport.packages import require
    from kvexport.terminal import show
    from kvexport.validate.layers import first_layers
    from kvexport.validate.runner import validate_artifact
    from kvexport.validate.sections import sections

    def compare(path: Path, weights: str | None) -> ValidationResult:
        return validate_artifact(
            path, length=length, batch=batch, seed=seed, checkpoint=weights, backend=backend, progress=show
        )

    if layers is None:
        result = compare(artifact, checkpoint)
    else:
        require("validate")
        total = load_manifest(artifact).model.layers
        with first_layers(artifact, layers, checkpoint, show) as shortened:
            name = backend or load_manifest(shortened).recipe.backend.name
            if backends.get(name).prepared:  # it has only ONNX graphs yet
                from kvexport.export.rebuild import rebuild

                rebuild(shortened, overrides=[f"backend.name={name}"], progress=show)
            result = replace(compare(shortened, None), artifact=str(artifact), layers=(layers, total))
    if result.warning:
        typer.echo(f"warning: {result.warning}", err=True)
    print_result(as_json, result.to_json, lambda: sections(result))
    if not result.passed:
        raise MismatchError(
            result.problem,
            "KVEXPORT_OPERATORS=off shows whether native operators differ; report it with validate --json",
        )
