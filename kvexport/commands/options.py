"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvexport.backends.sections import names


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes that begin so."""
    from kvexport.recipe.inherit import recipe_folder

    return sorted(path.stem for path in recipe_folder().glob("*.yaml") if path.stem.startswith(incomplete))


RECIPE = typer.Option(
    "--recipe", metavar="NAME_OR_FILE", help="A recipe's name or file.", autocompletion=complete_recipe
)
RecipeOption = Annotated[str, RECIPE]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value; repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page too.")]
TelemetryOption = Annotated[
    bool, typer.Option("--telemetry", help="Show what every merge does to the attention output.")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help=f"{' or '.join(names())}, in place of its own.")
]
ArtifactArgument = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The directory of an artifact.")]
