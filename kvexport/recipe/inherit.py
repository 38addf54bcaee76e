"""Where recipes are, and a recipe over everything that it extends.

A recipe may say ``extends: NAME`` (of the recipe folder) or ``extends: ./file.yaml`` (beside it). What it says goes
over what it extends, mapping by mapping.
"""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from kvexport import paths
from kvexport.methods import all_methods
from kvexport.recipe.cache import CacheSection
from kvexport.recipe.check import METHOD, PARAMETERS, did_you_mean, get, scalar_at, shown
from kvexport.recipe.parse import Findings, Leaf, Tree, merge, plain, read_file


def recipe_folder() -> Path:
    """Where named recipes are: inside an installed package, else beside it in the repository."""
    installed = paths.PACKAGE / "_recipes"
    return installed if installed.is_dir() else paths.PACKAGE.parent / "recipes"


def named_recipes() -> dict[str, Path]:
    """The files of the recipe folder by name, sorted."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}


def locate(name: str, folder: Path, found: Findings, place: str = "") -> Path | None:
    """The file that `name` means; said in `folder`, at `place`."""
    if name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        return Path(os.path.normpath(folder / name))
    known = named_recipes()
    if name not in known:
        said = f" ({place})" if place else ""
        found.lose(
            f"unknown recipe {name!r}{said}{did_you_mean(get_close_matches(name, known))}; known: "
            f"{', '.join(known) or 'none'}"
        )
    return known.get(name)


def label_of(path: Path) -> str:
    """A file in messages: the same for a shipped recipe wherever it is installed."""
    if path.parent == recipe_folder():
        return f"recipes/{path.name}"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _identity(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL: reading it says so
        return path


def read_with_parents(start: Path, found: Findings) -> Tree:
    """A file over everything that it extends."""
    layers: list[Tree] = []
    trail: dict[Path, str] = {}
    path: Path | None = start
    said = ""
    while path is not None:
        trail[_identity(path)] = label_of(path)
        tree = read_file(path, label_of(path), said, found)
        parent = tree.entries.pop("extends", None)
        layers.append(tree)
        if parent is None:
            break
        said = parent.origin.place
        if not isinstance(parent, Leaf) or not isinstance(parent.value, str):
            found.lose(f"extends: should be the name of a recipe or ./file.yaml, found {shown(plain(parent))} ({said})")
            break
        path = locate(parent.value, path.parent, found, said)
        if path is not None and _identity(path) in trail:
            circle = list(trail.values())[list(trail).index(_identity(path)) :]
            found.lose(f"extends goes round in a circle: {' -> '.join([*circle, circle[0]])} ({said})")
            break
    merged = layers.pop()
    while layers:
        merged = inherit(merged, layers.pop())
    return merged


def inherit(parent: Tree, child: Tree) -> Tree:
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
