"""The command `kvexport plan`: how much memory a model needs, before anything is built."""

from __future__ import annotations

from typing import Annotated

import typer

from kvexport.commands.options import (
    RECIPE,
    BudgetOption,
    JsonOption,
    MaxLengthOption,
    ModelArgument,
    SetOption,
)
from kvexport.commands.output import print_result


def plan(
    model: ModelArgument = None,
    recipe: Annotated[str | None, RECIPE] = None,
    budget: BudgetOption = None,
    max_length: MaxLengthOption = None,
    overrides: SetOption = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Show how many sequences fit this memory, such as 24GB or 24GiB.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute how much memory a model or a recipe needs, before anything is built.

    No budgets are measured: every KV head of a model has the same budget in its plan.

    Example: kvexport plan Qwen/Qwen3-0.6B --budget 1024
    """
    from kvexport.export.build import plan_memory
    from kvexport.models import recipe_of_command, settings_of
    from kvexport.terminal import show
    from kvexport.units import parse_bytes

    amount = None if memory is None else parse_bytes(memory)
    changes = settings_of(budget, max_length, overrides or ())
    loaded = recipe_of_command("plan", model, recipe, changes, calibrate=False)
    with show("reading the checkpoint"):
        memory_plan = plan_memory(loaded.recipe, loaded.name)
    fit = None if amount is None else memory_plan.fit(amount)
    print_result(
        as_json, lambda: {**memory_plan.to_json(), "fit": vars(fit) if fit else None}, lambda: memory_plan.sections(fit)
    )
