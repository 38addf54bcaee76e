"""The command `kvexport plan`: how much memory a recipe needs, before anything is built."""

from __future__ import annotations

from typing import Annotated

import typer

from kvexport.commands.options import JsonOption, RecipeOption, SetOption
from kvexport.commands.output import print_result


def plan(
    recipe: RecipeOption,
    overrides: SetOption = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Show how many sequences fit this memory, such as 24GB or 24GiB.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute how much memory a recipe needs, before anything is built."""
    from kvexport.planning import plan_memory
    from kvexport.recipe.load import load_recipe
    from kvexport.terminal import show
    from kvexport.units import parse_bytes

    amount = None if memory is None else parse_bytes(memory)
    loaded = load_recipe(recipe, overrides or ())
    with show("reading the checkpoint"):
        memory_plan = plan_memory(loaded.recipe, loaded.name)
    fit = None if amount is None else memory_plan.fit(amount)
    print_result(
        as_json, lambda: {**memory_plan.to_json(), "fit": vars(fit) if fit else None}, lambda: memory_plan.sections(fit)
    )
