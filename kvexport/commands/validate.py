"""The command `kvexport validate`: a comparison of an artifact with PyTorch."""

from __future__ import annotations

from typing import Annotated

import typer

from kvexport.commands.options import ArtifactArgument, BackendOption, HtmlOption, JsonOption
from kvexport.commands.output import print_result, require_folder, write_page
from kvexport.errors import MismatchError


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
    backend: BackendOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Compare an artifact with PyTorch, step by step."""
    from kvexport.terminal import show
    from kvexport.validate.runner import validate_artifact
    from kvexport.validate.sections import sections

    require_folder(html)
    result = validate_artifact(
        artifact, length=length, batch=batch, checkpoint=checkpoint, seed=seed, backend=backend, progress=show
    )
    if result.warning:
        typer.echo(f"warning: {result.warning}", err=True)
    if html is not None:
        write_page(html, f"Validation of {artifact}", result.problem or "passed", sections(result))
    print_result(as_json, result.to_json, lambda: sections(result))
    if result.problem:
        fix = "KVEXPORT_OPERATORS=off shows whether native operators differ; report it with validate --json"
        raise MismatchError(result.problem, fix)
