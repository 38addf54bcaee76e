"""Command line options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kvexport.backends.sections import names
from kvexport.errors import UsageError


def in_panel(name: str) -> Callable[..., Any]:
    """Return a `typer.Option` function for options that the help text lists in the group `name`."""
    return partial(typer.Option, rich_help_panel=name)


model_option, backend_option, output_option = (in_panel(name) for name in ("Model", "Backend", "Output"))


class Command(TyperCommand):
    """A command whose help text lists its options in groups, by their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for panel in sorted(panels, key=lambda name: (name != "Arguments", name == "Options")):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


def complete_recipe(incomplete: str) -> list[str]:
    """Return the names of shipped recipes that begin with `incomplete`, for completion in the shell."""
    from kvexport.recipe.inherit import recipe_folder

    return sorted(path.stem for path in recipe_folder().glob("*.yaml") if path.stem.startswith(incomplete))


RECIPE = model_option(
    "--recipe", metavar="NAME_OR_FILE", help="The name of a recipe, or its file.", autocompletion=complete_recipe
)
RecipeOption = Annotated[str, RECIPE]
SetOption = Annotated[
    list[str] | None,
    model_option("--set", metavar="KEY=VALUE", help="Override a value of the recipe. This option is repeatable."),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A hub id, the folder of a checkpoint, or a GGUF file."),
]
BudgetOption = Annotated[
    int | None,
    model_option(
        "--budget",
        min=1,
        metavar="SLOTS",
        help="The slots of each KV head. [default: 1024 for a model, or the recipe's]",
    ),
]
MaxLengthOption = Annotated[
    int | None,
    model_option(
        "--max-length",
        min=1,
        metavar="TOKENS",
        help="The largest number of tokens of one sequence. [default: the length a model was trained for, at most "
        "32768, or the recipe's]",
    ),
]
CalibrateOption = Annotated[
    bool | None,
    model_option(
        "--calibrate/--no-calibrate",
        help="Measure how a model's KV heads should share the budget, or give them equal budgets. [default: measure "
        "where the model and the machine allow it]",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, output_option("--json", help="Print the result as JSON.")]
BackendOption = Annotated[
    str | None,
    backend_option(
        "--backend",
        metavar="NAME",
        help=f"Use the backend {' or '.join(names())} in place of the artifact's own.",
    ),
]
DeviceOption = Annotated[
    str | None,
    backend_option("--device", metavar="cpu|cuda", help="Run on this device in place of the recipe's."),
]
AdapterOption = Annotated[
    str | None,
    model_option("--adapter", metavar="NAME=FOLDER", help="Answer with this LoRA adapter, in PEFT's format."),
]


def adapters_of(options: Sequence[str]) -> dict[str, str]:
    """Return the folder of each LoRA adapter by its name, from values NAME=FOLDER of the option --adapter."""
    adapters: dict[str, str] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not name or not folder or name in adapters:
            problem = f"names {name!r} twice" if name in adapters else f"is {option!r}, expected a name and a folder"
            raise UsageError(f"--adapter {problem}", "--adapter NAME=FOLDER")
        adapters[name] = folder
    return adapters


ArtifactArgument = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The folder of an artifact.")]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder of an artifact; or a hub id, a checkpoint's folder or a GGUF file, which is built the first "
        "time.",
    ),
]
