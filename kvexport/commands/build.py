"""`kvexport build`: a recipe, or an artifact without engines for this machine, becomes an artifact."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import RECIPE, BackendOption, JsonOption, SetOption
from kvexport.commands.output import print_json
from kvexport.errors import UsageError


class Stage(str, Enum):
    """How far a build goes."""

    onnx = "onnx"
    all = "all"


def build(
    recipe: Annotated[str | None, RECIPE] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; default artifacts/RECIPE.")
    ] = None,
    backend: BackendOption = None,
    stage: Annotated[
        Stage, typer.Option(help="Only the ONNX graphs; engines are then built with --from where they will run.")
    ] = Stage.all,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Add engines for this machine to that artifact.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build an artifact from a recipe and print its path."""
    if recipe is None and source is None:
        raise typer.BadParameter("one of --recipe NAME and --from DIR is needed")
    start = time.monotonic()
    built = build_artifact(recipe, overrides or (), out, backend, stage, source)
    if not as_json:
        print(built)
        return
    from kvexport.artifact.reading import load_manifest

    manifest = load_manifest(built, verify=False)
    figures = {"files": len(manifest.files), "bytes": manifest.bytes, "seconds": time.monotonic() - start}
    print_json({"artifact": str(built), "recipe": manifest.name, **figures})


def build_artifact(
    recipe: str | None,
    overrides: Sequence[str],
    out: Path | None,
    backend: str | None,
    stage: Stage,
    source: Path | None,
) -> Path:
    """Build from the recipe, or engines from `source`, and return the artifact's directory."""
    from kvexport.terminal import show

    if source is not None and (recipe is not None or stage is Stage.onnx):
        raise UsageError("--from takes an artifact's own recipe and graphs", "--from DIR alone, or --recipe NAME")
    changes = [*overrides, *([f"backend.name={backend}"] if backend else [])]
    if source is not None:
        from kvexport.export.rebuild import rebuild

        return rebuild(source, out, changes, progress=show)
    assert recipe is not None
    from kvexport.packages import require
    from kvexport.recipe.load import load_recipe

    loaded = load_recipe(recipe, changes)
    require("build")
    from kvexport.export.build import build

    if out is None:
        out = Path("artifacts") / loaded.name
        out.parent.mkdir(exist_ok=True)
    return build(loaded.recipe, out, name=loaded.name, graphs_only=stage is Stage.onnx, progress=show)
