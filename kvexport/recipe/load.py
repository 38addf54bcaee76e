"""A recipe by its name or file, read in four steps: parse, inherit, override, check. All problems are told at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.errors import UsageError
from kvexport.recipe.check import Key, check_recipe, place_of
from kvexport.recipe.fields import Recipe
from kvexport.recipe.inherit import inherit, label_of, locate, read_with_parents
from kvexport.recipe.override import read_overrides
from kvexport.recipe.parse import Findings


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and how it came about. origin: dotted key of every value in `resolved` -> "default", "recipes/x.yaml:7"
    (the line of the value) or "--set cache.budget=512". resolved: plain data, defaults and the method's parameters
    written out, a local `model.path` absolute; `Recipe(**resolved)` is `recipe`."""

    name: str
    recipe: Recipe
    origin: dict[str, str]
    resolved: dict[str, Any]


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """A recipe of the folder by its name, or of a file (ends in .yaml or .yml, or has a path separator), with `--set`
    overrides.

    overrides: "dotted.key=value", the value in YAML; a later one wins. A relative `model.path` (./ or ../) is relative
    to the folder of the file that says it, or to the current directory where an override says it; an override may also
    name an existing directory without ./; anything else is a hub id or a wheel.

    Raises UsageError with every problem of the files and overrides, one per line, each with its file and line.
    """
    found = Findings()
    path = locate(name_or_path, Path.cwd(), found)
    if path is None:
        raise UsageError(
            "\n".join(found.problems),
            "`kvexport recipes` lists them; a file is written with its path, ./my-recipe.yaml",
        )
    tree = inherit(read_with_parents(path, found), read_overrides(overrides, found))
    recipe = check_recipe(tree, label_of(path), found)
    if recipe is None or found.problems:
        raise UsageError("\n".join(dict.fromkeys(found.problems)), _fix(found.problems))
    resolved = recipe.model_dump(mode="json")
    origin = {".".join(key): place_of(tree, key) or "default" for key in _leaves(resolved)}
    return LoadedRecipe(path.stem, recipe, origin, resolved)


def _leaves(data: Mapping[str, Any], above: Key = ()) -> Iterator[Key]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)


def _fix(problems: Sequence[str]) -> str:
    if any("cache.parameters" in text or "cache.method" in text for text in problems):
        return "correct the lines named above; `kvexport recipes methods` lists the methods and their parameters"
    if any(text.startswith("model.path is missing") for text in problems):
        return "--set model.path=FOLDER_OR_HUB_ID, or a recipe that extends this one and names its model"
    return "correct the lines named above"
