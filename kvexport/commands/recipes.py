"""The command `kvexport recipes`: list the recipes, show one, list the compression methods."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvexport.commands.options import JsonOption, SetOption, complete_recipe
from kvexport.commands.output import print_json, print_result

if TYPE_CHECKING:
    from kvexport.report import Section


def recipes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the recipes; show one; list the compression methods."""
    if context.invoked_subcommand is not None:
        return
    from kvexport.recipe.listing import list_recipes
    from kvexport.report import Table

    listed = list_recipes()
    header = ("recipe", "model", "dtype", "method", "budget", "max length", "description")
    rows = [
        (r.name, r.model or "(a base: extend it)", r.dtype, r.method, r.slots, r.max_length, r.description)
        if not r.problem
        else (r.name, None, None, None, None, None, f"CANNOT BE LOADED: {'; '.join(r.problem.splitlines())}")
        for r in listed
    ]
    print_result(
        as_json, lambda: [{**vars(r), "path": str(r.path)} for r in listed], lambda: [Table("Recipes", header, rows)]
    )


def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", autocompletion=complete_recipe)],
    overrides: SetOption = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Show inherited values and defaults as well.")] = False,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a recipe: its own file, or all values with those that it inherits."""
    import yaml

    from kvexport.recipe.listing import list_recipes
    from kvexport.recipe.load import load_recipe
    from kvexport.report import Table

    path = {info.name: info.path for info in list_recipes()}.get(name, Path(name))
    if not (resolved or origin or as_json or overrides) and path.is_file():
        print(path.read_text(encoding="utf-8"), end="")
        return
    loaded = load_recipe(name, overrides or ())
    if origin and not as_json:
        values = {key: reduce(getitem, key.split("."), loaded.resolved) for key in loaded.origin}
        rows = [(key, json.dumps(values[key]), place) for key, place in loaded.origin.items()]
        print_result(False, dict, lambda: [Table(f"Recipe {loaded.name}", ("key", "value", "from"), rows)])
    elif as_json:
        print_json({"name": loaded.name, "resolved": loaded.resolved, "origin": loaded.origin})
    else:
        print(yaml.safe_dump(loaded.resolved, sort_keys=False, allow_unicode=True), end="")


def recipes_methods(as_json: JsonOption = False) -> None:
    """List the compression methods and their parameters."""
    from dataclasses import asdict

    from kvexport.recipe.listing import describe_method_parameters
    from kvexport.report import Paragraph, Table

    methods = describe_method_parameters()

    def sections() -> list[Section]:
        listed: list[Section] = [
            Table("Methods", ("method", "what it does", "source"), [(m.name, m.summary, m.source) for m in methods])
        ]
        for m in (m for m in methods if m.parameters):
            rows = [(p.name, p.type, "required" if p.required else str(p.default), p.constraint) for p in m.parameters]
            listed += [
                Table(f"Parameters of {m.name}", ("parameter", "type", "default", "allowed"), rows),
                Paragraph(m.details),
            ]
        return listed

    print_result(as_json, lambda: [asdict(method) for method in methods], sections)
