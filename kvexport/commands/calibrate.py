"""`kvexport calibrate`: the layers that recall hangs on, and the recipe's line that keeps them whole; or what
each layer, or each KV head, needs of the budget for a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvexport.commands.options import JsonOption, RecipeOption, SetOption
from kvexport.commands.output import print_result, read_text
from kvexport.errors import UsageError


def calibrate(
    recipe: RecipeOption,
    overrides: SetOption = None,
    of: Annotated[
        Literal["recall", "text", "heads"],
        typer.Option(
            help="What is to be kept: answers about a text (whole layers), or how it goes on (text: shares of layers; "
            "heads: of KV heads)."
        ),
    ] = "recall",
    length: Annotated[
        int | None, typer.Option(min=128, max=2**31 - 1, help="Tokens of a text; default 1000, or what has room.")
    ] = None,
    passages: Annotated[int, typer.Option(min=1, help="Texts; of recall with six questions each.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the facts and their places.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of this text, not of Python's manual (recall) or library (text, heads)."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Of heads: recall, or tasks of kvexport eval; all count alike. Default text."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which layers find facts in a text again, and which of them the recipe's budget can keep whole; or how the
    layers, or their KV heads, should share it."""
    from kvexport.packages import require

    require("calibrate")
    from kvexport.calibrate.head_shares import HeadShares, calibrate_heads
    from kvexport.calibrate.layer_shares import Shares, calibrate_text
    from kvexport.calibrate.recall_layers import Calibration, calibrate
    from kvexport.terminal import show

    source = None if text is None else read_text(text)
    named: dict[str, Any] = {} if tasks is None else {"tasks": [word.strip() for word in tasks.split(",")]}
    if named and of != "heads":
        raise UsageError(f"--tasks is of --of heads, and this is --of {of}", "--of heads, or without --tasks")
    measures: dict[str, Callable[..., Calibration | Shares | HeadShares]] = {
        "recall": calibrate,
        "text": calibrate_text,
        "heads": calibrate_heads,
    }
    given = {"length": length, "passages": passages, "seed": seed, "text": source, **named}
    found = measures[of](recipe, overrides or (), progress=show, **given)
    print_result(as_json, found.to_json, found.sections)
