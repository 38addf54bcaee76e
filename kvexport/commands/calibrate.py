"""`kvexport calibrate`: the layers that recall hangs on, and the recipe's line that keeps them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import JsonOption, RecipeOption, SetOption
from kvexport.commands.output import print_result, read_text


def calibrate(
    recipe: RecipeOption,
    overrides: SetOption = None,
    length: Annotated[
        int | None, typer.Option(min=128, max=2**31 - 1, help="Tokens of a text; default 1000, or what has room.")
    ] = None,
    passages: Annotated[int, typer.Option(min=1, help="Texts, with six questions each.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the facts and their places.")] = 0,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put facts into this text, not into Python's manual.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which layers find facts in a text again, and which of them the recipe's budget can keep whole."""
    from kvexport.packages import require

    require("calibrate")
    from kvexport.evaluate.calibrate import calibrate as measure
    from kvexport.terminal import show

    source = None if text is None else read_text(text)
    found = measure(recipe, overrides or (), length=length, passages=passages, seed=seed, text=source, progress=show)
    print_result(as_json, found.to_json, found.sections)
