"""The command `kvexport calibrate`: shares of the cache budget for the KV heads of a recipe's model, by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import JsonOption, RecipeOption, SetOption
from kvexport.commands.output import print_result


def calibrate(
    recipe: RecipeOption,
    overrides: SetOption = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=128, max=2**31 - 1, help="The tokens of a text. [default: about 1000, if the recipe has room]"
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Take a kind of text from each .txt or .md file of this folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how KV heads should share the recipe's budget, by the loss that evictions from each of them cause."""
    from kvexport.packages import require

    require("calibrate")
    from kvexport.calibrate.head_shares import calibrate_heads
    from kvexport.terminal import show

    calibration = calibrate_heads(recipe, overrides or (), length=length, texts=texts, progress=show)
    print_result(as_json, calibration.to_json, calibration.sections)
