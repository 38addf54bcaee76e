"""The command `kvexport calibrate`: measured cache budgets for the layers or KV heads of a recipe's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvexport.commands.options import HtmlOption, JsonOption, RecipeOption, SetOption
from kvexport.commands.output import print_result, read_text, require_folder, write_page
from kvexport.errors import UsageError


def calibrate(
    recipe: RecipeOption,
    overrides: SetOption = None,
    of: Annotated[
        Literal["recall", "text", "heads"],
        typer.Option(help="The purpose: recall (whole layers), text (shares of layers) or heads (shares of KV heads)."),
    ] = "recall",
    length: Annotated[
        int | None,
        typer.Option(
            min=128, max=2**31 - 1, help="The tokens of a text. [default: about 1000, if the recipe has room]"
        ),
    ] = None,
    passages: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The number of texts; for recall with six questions each. [default: 4, with --of heads 2]",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the texts.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take texts from this file, not from Python's manual or library."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="With --of heads: kinds (several kinds of text), recall, or tasks of kvexport eval. [default: "
            "kinds,recall]",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --of heads: take a kind of text from each .txt or .md file of this folder.",
        ),
    ] = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Measure how layers or KV heads should share the recipe's budget.

    `--of recall` finds the layers on which recall of facts depends, and those that the budget can keep whole. `--of
    text` and `--of heads` measure the loss that evictions from each layer or KV head cause.
    """
    from kvexport.packages import require

    require("calibrate")
    from kvexport.calibrate.head_shares import HeadShares, calibrate_heads
    from kvexport.calibrate.layer_shares import Shares, calibrate_text
    from kvexport.calibrate.recall_layers import Calibration, calibrate
    from kvexport.terminal import show

    require_folder(html)
    source = None if text is None else read_text(text)
    named: dict[str, Any] = {} if passages is None else {"passages": passages}
    own = [("--tasks", tasks), ("--texts", texts)]
    for option, value in own:
        if value is not None and of != "heads":
            raise UsageError(f"{option} is of --of heads, and this is --of {of}", f"--of heads, or without {option}")
    if of == "heads":
        named |= {"texts": texts, "tasks": tasks and [word.strip() for word in tasks.split(",")]}
    measures: dict[str, Callable[..., Calibration | Shares | HeadShares]] = {
        "recall": calibrate,
        "text": calibrate_text,
        "heads": calibrate_heads,
    }
    arguments = {"length": length, "seed": seed, "text": source, **named}
    calibration = measures[of](recipe, overrides or (), progress=show, **arguments)
    if html is not None:
        write_page(html, f"Calibration of {calibration.recipe}", "Cache budgets by measurement", calibration.sections())
    print_result(as_json, calibration.to_json, calibration.sections)
