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
    name: str
    path: Path
    description: str = ""
    model: str | None = None  # `model.path` as the file contains it; None for a base recipe
    dtype: str = ""
    method: str = ""
    budget: int | float | None = None  # as the file contains it: slots, or a share of the longest sequence
    slots: int | None = None  # mean budget of a layer
    max_length: int | str | None = None  # tokens, or "unlimited"
    base: bool = False  # whether it names no model, so that only other recipes extend it
    problem: str = ""  # why the recipe cannot be loaded; only name and path are then set


@dataclass(frozen=True)
class MethodInfo:
    name: str
    summary: str
    source: str
    compresses: bool  # False if only entries that a sliding window has passed are evicted
    details: str  # docstring of the method's class
    parameters: tuple[ParameterInfo, ...]


def list_recipes() -> list[RecipeInfo]:
    return [_describe(name, path) for name, path in named_recipes().items()]


def describe_method_parameters() -> list[MethodInfo]:
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
