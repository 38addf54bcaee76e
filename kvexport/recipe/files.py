"""Recipes on disk: finding them, reading YAML with the line of every value, `extends`, `--set`, and all their problems
at once.

A recipe is a mapping of `kvexport.recipe.fields.Recipe`'s keys in YAML, and may say ``extends: NAME`` (of the recipe
folder) or ``extends: ./file.yaml`` (beside it). What a recipe says goes over what it extends, mapping by mapping;
`--set` goes over both.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvexport import paths
from kvexport.errors import UsageError
from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.recipe.check import (
    METHOD,
    PARAMETERS,
    PATH,
    Key,
    check_recipe,
    did_you_mean,
    get,
    place_of,
    scalar_at,
    shown,
)
from kvexport.recipe.fields import CacheSection, Recipe
from kvexport.recipe.parse import Entry, Findings, Leaf, Origin, Source, Tree, merge, plain, read_file

BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<=", "minLength": "length >="}


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and how it came about. origin: dotted key of every value in `resolved` -> "default", "recipes/x.yaml:7"
    (the line of the value) or "--set cache.budget=512". resolved: plain data, defaults and the method's parameters
    written out, a local `model.path` absolute; `Recipe(**resolved)` is `recipe`."""

    name: str
    recipe: Recipe
    origin: dict[str, str]
    resolved: dict[str, Any]


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
    max_length: int | None = None
    base: bool = False
    problem: str = ""


@dataclass(frozen=True)
class ParameterInfo:
    """A method's parameter. constraint: ">= 0, < 1" or "key | vote | mean", "" where only the type binds; required: no
    default."""

    name: str
    type: str
    default: Any
    constraint: str
    required: bool = False


@dataclass(frozen=True)
class MethodInfo:
    """A method for a listing. details: its docstring, which says what each parameter means."""

    name: str
    summary: str
    source: str
    compresses: bool
    details: str
    parameters: tuple[ParameterInfo, ...]


def recipe_folder() -> Path:
    """Where named recipes are: inside an installed package, else beside it in the repository."""
    installed = paths.PACKAGE / "_recipes"
    return installed if installed.is_dir() else paths.PACKAGE.parent / "recipes"


def list_recipes() -> list[RecipeInfo]:
    """Every recipe of the folder by name; one that cannot be loaded is listed with its problem."""
    return [_describe(name, path) for name, path in _named().items()]


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """A recipe of the folder by its name, or of a file (ends in .yaml or .yml, or has a path separator), with `--set`
    overrides.

    overrides: "dotted.key=value", the value in YAML; a later one wins. A relative `model.path` (./ or ../) is relative
    to the folder of the file that says it, or to the current directory where an override says it; an override may also
    name an existing directory without ./; anything else is a hub id.

    Raises UsageError with every problem of the files and overrides, one per line, each with its file and line.
    """
    found = Findings()
    path = _locate(name_or_path, Path.cwd(), found)
    if path is None:
        raise UsageError(
            "\n".join(found.problems),
            "`kvexport recipes` lists them; a file is written with its path, ./my-recipe.yaml",
        )
    tree = _inherit(_read_chain(path, found), _read_overrides(overrides, found))
    recipe = check_recipe(tree, _label(path), found)
    if recipe is None or found.problems:
        raise UsageError("\n".join(dict.fromkeys(found.problems)), _fix(found.problems))
    resolved = recipe.model_dump(mode="json")
    origin = {".".join(key): place_of(tree, key) or "default" for key in _leaves(resolved)}
    return LoadedRecipe(path.stem, recipe, origin, resolved)


def describe_method_parameters() -> list[MethodInfo]:
    """Every method with its parameters, their defaults and constraints, from the methods' own fields."""
    return [
        MethodInfo(
            name,
            method.summary,
            method.source,
            method.compresses,
            inspect.getdoc(method) or "",
            tuple(_parameters(method)),
        )
        for name, method in all_methods().items()
    ]


def _parameters(method: type[Method]) -> Iterator[ParameterInfo]:
    schema = method.model_json_schema()
    for name, prop in schema["properties"].items():
        bounds = [f"{sign} {prop[word]:g}" for word, sign in BOUNDS.items() if word in prop]
        constraint = " | ".join(map(str, prop["enum"])) if "enum" in prop else ", ".join(bounds)
        kind = prop.get("type") or " or ".join(str(option.get("type", "any")) for option in prop.get("anyOf", [{}]))
        yield ParameterInfo(name, kind, prop.get("default"), constraint, name in schema.get("required", []))


def _describe(name: str, path: Path) -> RecipeInfo:
    found = Findings()
    tree = _inherit(_read_chain(path, found), Tree({}, Origin("", "", path.parent)))
    written = get(tree, PATH)
    base = written is None and not isinstance(get(tree, PATH[:1]), Leaf) and not found.problems
    if base:
        # A base is judged by all that it does say.
        tree = merge(tree, _nest(PATH, Leaf("-", tree.origin)))
    recipe = check_recipe(tree, _label(path), found)
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
        max_length=recipe.limits.max_length,
        base=base,
    )


def _named() -> dict[str, Path]:
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}


def _locate(name: str, folder: Path, found: Findings, place: str = "") -> Path | None:
    """The file that `name` means; said in `folder`, at `place`."""
    if name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        return Path(os.path.normpath(folder / name))
    known = _named()
    if name not in known:
        said = f" ({place})" if place else ""
        found.lose(
            f"unknown recipe {name!r}{said}{did_you_mean(get_close_matches(name, known))}; known: "
            f"{', '.join(known) or 'none'}"
        )
    return known.get(name)


def _label(path: Path) -> str:
    """A file in messages: the same for a shipped recipe wherever it is installed."""
    if path.parent == recipe_folder():
        return f"recipes/{path.name}"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _identity(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL: reading it says so
        return path


def _read_chain(start: Path, found: Findings) -> Tree:
    """A file over everything that it extends."""
    layers: list[Tree] = []
    trail: dict[Path, str] = {}
    path: Path | None = start
    said = ""
    while path is not None:
        trail[_identity(path)] = _label(path)
        tree = read_file(path, _label(path), said, found)
        parent = tree.entries.pop("extends", None)
        layers.append(tree)
        if parent is None:
            break
        said = parent.origin.place
        if not isinstance(parent, Leaf) or not isinstance(parent.value, str):
            found.lose(f"extends: should be the name of a recipe or ./file.yaml, found {shown(plain(parent))} ({said})")
            break
        path = _locate(parent.value, path.parent, found, said)
        if path is not None and _identity(path) in trail:
            circle = list(trail.values())[list(trail).index(_identity(path)) :]
            found.lose(f"extends goes round in a circle: {' -> '.join([*circle, circle[0]])} ({said})")
            break
    merged = layers.pop()
    while layers:
        merged = _inherit(merged, layers.pop())
    return merged


def _read_overrides(overrides: Sequence[str], found: Findings) -> Tree:
    layer = Tree({}, Origin("", "", Path.cwd()))
    for text in overrides:
        label = f"--set {text}" if text.isprintable() else f"--set {text!r}"
        dotted, equals, value = text.partition("=")
        key = tuple(part.strip() for part in dotted.split("."))
        if not equals or not all(key) or len(key) > 8:
            found.lose(f"{label}: should be --set KEY=VALUE with a dotted key, such as --set cache.budget=512")
        elif key[0] == "extends":
            found.problems.append(f"{label}: extends is written in a file, not set")
        else:
            entry = Source(label, Path.cwd(), False, found).read(value)
            if entry is not None:
                layer = merge(layer, _nest(key, entry))
    return layer


def _nest(key: Key, entry: Entry) -> Tree:
    for part in reversed(key):
        entry = Tree({part: entry}, entry.origin)
    assert isinstance(entry, Tree)
    return entry


def _inherit(parent: Tree, child: Tree) -> Tree:
    """`child` over `parent`."""
    method = scalar_at(child, METHOD)
    before = scalar_at(parent, METHOD) or CacheSection.model_fields["method"].default
    inherited = get(parent, PARAMETERS)
    if isinstance(method, str) and method in all_methods() and method != before and isinstance(inherited, Tree):
        # Parameters belong to the method they were written for: without this no recipe with parameters could be
        # extended by another method, since YAML has no way to take a key away.
        kept = {name: entry for name, entry in inherited.entries.items() if name in all_methods()[method].model_fields}
        cache = parent.entries["cache"]
        assert isinstance(cache, Tree)
        cache = replace(cache, entries={**cache.entries, "parameters": replace(inherited, entries=kept)})
        parent = replace(parent, entries={**parent.entries, "cache": cache})
    return merge(parent, child)


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
