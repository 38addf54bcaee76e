"""Loading of a recipe by its name or file, in four steps: parse, inherit, override, check.

A model without a recipe file has a recipe of a checkpoint, a budget, and defaults for all other keys. All problems of a
recipe are reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.errors import UsageError
from kvexport.recipe.check import Key, check_recipe, place_of
from kvexport.recipe.divergence import Divergence
from kvexport.recipe.fields import Recipe
from kvexport.recipe.inherit import inherit, label_of, locate, read_with_parents
from kvexport.recipe.parse import Findings, Tree, read_overrides

BUDGET = 1024
METHOD = "ballot"  # the lowest loss of the methods at equal bytes on most tasks; docs/measurements/quality.md


@dataclass(frozen=True)
class LoadedRecipe:
    name: str  # the stem of its file
    recipe: Recipe
    # By dotted key: "default", a file and line such as "recipes/x.yaml:7", or "--set cache.budget=512"
    origin: dict[str, str]
    # The recipe as plain data, with all defaults and an absolute path of a local model: `Recipe(**resolved) == recipe`
    resolved: dict[str, Any]
    divergence: Divergence | None = None  # how far its KV cache is from the full one, if that was measured


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe of a name or file, with overrides such as "cache.budget=512" applied.

    A relative `model.path` (./ or ../) is relative to the folder of the file that contains it, or to the current
    directory in an override. An override may also name an existing directory without ./ in front. All other values of
    `model.path` are hub ids or wheels. A UsageError has a line for every problem, with its file and line number.
    """
    findings = Findings()
    path = locate(name_or_path, Path.cwd(), findings)
    if path is None:
        raise UsageError(
            "\n".join(findings.problems),
            "`kvexport recipes` lists them; a file is written with its path, ./my-recipe.yaml",
        )
    tree = inherit(read_with_parents(path, findings), read_overrides(overrides, findings))
    return checked(tree, label_of(path), path.stem, findings)


def recipe_for(model: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe of a checkpoint that has no recipe file: a hub id, a folder, or a GGUF file.

    Every KV head gets BUDGET slots; `kvexport.models.calibrated_recipe` measures budgets. Overrides take precedence.
    """
    settings = [f"model.path={json.dumps(model)}", f"cache.method={METHOD}", f"cache.budget={BUDGET}"]
    findings = Findings()
    tree = inherit(read_overrides(settings, findings), read_overrides(overrides, findings))
    return checked(tree, f"the recipe of {model}", name_of(model), findings)


def name_of(model: str) -> str:
    """Return a short name for a model: the last component of its hub id or path, without ".gguf"."""
    last = Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "-", last.removesuffix(".gguf")) or "model"


def checked(tree: Tree, label: str, name: str, findings: Findings) -> LoadedRecipe:
    recipe = check_recipe(tree, label, findings)
    if recipe is None or findings.problems:
        raise UsageError("\n".join(dict.fromkeys(findings.problems)), _fix(findings.problems))
    resolved = recipe.model_dump(mode="json")
    origin = {".".join(key): place_of(tree, key) or "default" for key in _leaves(resolved)}
    return LoadedRecipe(name, recipe, origin, resolved)


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
