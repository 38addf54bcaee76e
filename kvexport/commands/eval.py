"""The command `kvexport eval`: compression methods of the KV cache, compared at equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import JsonOption, RecipeOption, SetOption
from kvexport.commands.output import print_result, read_text


def evaluate(
    recipe: RecipeOption,
    overrides: SetOption = None,
    methods: Annotated[
        str,
        typer.Option(metavar="A,B:KEY=VALUE", help="The methods to compare. [default: streaming, h2o, the recipe's]"),
    ] = "",
    budgets: Annotated[
        str, typer.Option(metavar="1/8,64", help="The budgets, as shares of the length or as slots.")
    ] = "1/8,1/4,1/2",
    tasks: Annotated[str | None, typer.Option(metavar="A,B", help="The tasks. [default: text,decoded]")] = None,
    samples: Annotated[int, typer.Option(min=1, help="The samples per task.")] = 40,
    length: Annotated[
        int | None,
        typer.Option(min=16, max=2**31 - 1, help="The tokens of a prompt. [default: half of limits.max_length]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the tasks.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="The sequences that run at once.")] = 8,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure on this text in place of Python's library.")
    ] = None,
    ruler: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of RULER's prepared tasks.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods at equal bytes: perplexity, distance to the full cache, and RULER."""
    from kvexport.packages import require

    require("eval")
    from kvexport.evaluate.result import Options
    from kvexport.evaluate.runner import evaluate as measure
    from kvexport.evaluate.sections import sections
    from kvexport.evaluate.settings import parse_budgets
    from kvexport.evaluate.suites import read_ruler
    from kvexport.evaluate.tasks import TASKS
    from kvexport.terminal import say, show

    suites = {} if ruler is None else read_ruler(ruler)
    options = Options(
        methods=_words(methods),
        budgets=tuple(parse_budgets(budgets)),
        tasks=_words(tasks) if tasks is not None else () if suites else tuple(TASKS),
        samples=samples,
        length=length,
        seed=seed,
        batch=batch,
        source=None if text is None else read_text(text),
        suites=suites,
    )
    result = measure(recipe, overrides or (), options, show, say)
    print_result(as_json, result.to_json, lambda: sections(result))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
