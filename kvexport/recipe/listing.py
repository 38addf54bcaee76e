"""What there is to choose from: the shipped recipes, and the methods with their parameters."""

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
    """One line of a listing. model: as written; None for a base, which names none and is there to be extended. budget:
    as written; slots: the same in slots, mean of a layer. problem: why it cannot be loaded (then only name and path are
    known)."""

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
    """A method for a listing. details: its docstring, which says what each parameter means."""

    name: str
    summary: str
    source: str
    compresses: bool
    details: str
    parameters: tuple[ParameterInfo, ...]


def list_recipes() -> list[RecipeInfo]:
    """Every recipe of the folder by name; one that cannot be loaded is listed with its problem."""
    return [_describe(name, path) for name, path in named_recipes().items()]


def describe_method_parameters() -> list[MethodInfo]:
    """Every method with its parameters, their defaults and constraints, from the methods' own fields."""
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
    found = Findings()
    tree = inherit(read_with_parents(path, found), Tree({}, Origin("", "", path.parent)))
    written = get(tree, PATH)
    base = written is None and not isinstance(get(tree, PATH[:1]), Leaf) and not found.problems
    if base:
        # A base is judged by all that it does say.
        tree = merge(tree, nest(PATH, Leaf("-", tree.origin)))
    recipe = check_recipe(tree, label_of(path), found)
    if recipe is None or found.problems:
        return RecipeInfo(name, path, problem="\n".join(dict.fromkeys(found.problems)))
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
