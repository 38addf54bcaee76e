"""The listings of shipped recipes, and of compression methods with their parameters."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

from kvexport.methods import all_methods
from kvexport.recipe.check import PATH, check_recipe, get
from kvexport.recipe.describe import ParameterInfo, describe_fields
from kvexport.recipe.fields import shown_length
from kvexport.recipe.inherit import inherit, label_of, named_recipes, read_with_parents
from kvexport.recipe.parse import Findings, Leaf, Origin, Tree, merge, nest


@dataclass(frozen=True)
class RecipeInfo:
    """One line of the list of recipes that `kvexport recipes` shows.

    Attributes:
        name: The name of the recipe.
        path: The recipe's file.
        description: One line about the recipe.
        model: `model.path` as the file contains it; None for a base recipe, which names no model.
        dtype: The type of the weights.
        method: The compression method.
        budget: `cache.budget` as the file contains it: slots or a share.
        slots: The mean budget of a layer in slots.
        max_length: The longest sequence in tokens, or "unlimited".
        base: Whether the recipe is a base recipe, which other recipes extend.
        problem: The reason why the recipe cannot be loaded; all fields but name and path are then empty.
    """

    name: str
    path: Path
    description: str = ""
    model: str | None = None
    dtype: str = ""
    method: str = ""
    budget: int | float | None = None
    slots: int | None = None
    max_length: int | str | None = None
    base: bool = False
    problem: str = ""


@dataclass(frozen=True)
class MethodInfo:
    """One entry of the list of compression methods that `kvexport recipes methods` shows.

    Attributes:
        name: The name that recipes use.
        summary: One line about the method.
        source: The paper.
        compresses: False if the method evicts nothing except entries that a sliding window has passed.
        details: The docstring of the method's class.
        parameters: The method's parameters.
    """

    name: str
    summary: str
    source: str
    compresses: bool
    details: str
    parameters: tuple[ParameterInfo, ...]


def list_recipes() -> list[RecipeInfo]:
    """Return every recipe that kvexport ships; one that cannot be loaded is listed with its problem."""
    return [_describe(name, path) for name, path in named_recipes().items()]


def describe_method_parameters() -> list[MethodInfo]:
    """Return every compression method with its parameters, their defaults and constraints."""
    return [
        MethodInfo(
            name,
            method.summary,
            method.source,
            method.compresses,
            inspect.getdoc(method) or "",
            tuple(describe_fields(method)),
        )
        for name, method in all_methods().items()
    ]


def _describe(name: str, path: Path) -> RecipeInfo:
    findings = Findings()
    tree = inherit(read_with_parents(path, findings), Tree({}, Origin("", "", path.parent)))
    written = get(tree, PATH)
    base = written is None and not isinstance(get(tree, PATH[:1]), Leaf) and not findings.problems
    if base:
        # A base has no model; all other keys are checked.
        tree = merge(tree, nest(PATH, Leaf("-", tree.origin)))
    recipe = check_recipe(tree, label_of(path), findings)
    if recipe is None or findings.problems:
        return RecipeInfo(name, path, problem="\n".join(dict.fromkeys(findings.problems)))
    return RecipeInfo(
        name=name,
        path=path,
        description=recipe.description,
        model=written.value if isinstance(written, Leaf) else None,
        dtype=recipe.model.dtype,
        method=recipe.cache.method,
        budget=recipe.cache.budget,
        slots=recipe.budget,
        max_length=shown_length(recipe.limits.max_length),
        base=base,
    )
