"""The search for recipe files, and the inheritance between them.

A recipe may contain ``extends: NAME``, where NAME is a recipe of the recipe folder, or ``extends: ./file.yaml``,
relative to its own folder. The keys of the extending recipe override those of the extended recipe; nested mappings are
merged key by key.
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
    """Return the folder of the recipes that kvexport ships, which is in an installed package or in the repository."""
    installed = paths.PACKAGE / "_recipes"
    return installed if installed.is_dir() else paths.PACKAGE.parent / "recipes"


def named_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}


def locate(name: str, folder: Path, findings: Findings, place: str = "") -> Path | None:
    if name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        return Path(os.path.normpath(folder / name))
    known = named_recipes()
    if name not in known:
        where = f" ({place})" if place else ""
        findings.lose(
            f"unknown recipe {name!r}{where}{did_you_mean(get_close_matches(name, known))}; known: "
            f"{', '.join(known) or 'none'}"
        )
    return known.get(name)


def label_of(path: Path) -> str:
    """Return the name of a recipe file for messages. Recipes shipped with kvexport have equal names everywhere."""
    if path.parent == recipe_folder():
        return f"recipes/{path.name}"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _identity(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links or a NUL, which reading the file will report
        return path


def read_with_parents(start: Path, findings: Findings) -> Tree:
    """Return the contents of a recipe file merged over the contents of all recipes that it extends."""
    layers: list[Tree] = []
    trail: dict[Path, str] = {}
    path: Path | None = start
    extended_at = ""
    while path is not None:
        trail[_identity(path)] = label_of(path)
        tree = read_file(path, label_of(path), extended_at, findings)
        parent = tree.entries.pop("extends", None)
        layers.append(tree)
        if parent is None:
            break
        extended_at = parent.origin.place
        if not isinstance(parent, Leaf) or not isinstance(parent.value, str):
            findings.lose(
                f"extends: should be the name of a recipe or ./file.yaml, found {shown(plain(parent))} ({extended_at})"
            )
            break
        path = locate(parent.value, path.parent, findings, extended_at)
        if path is not None and _identity(path) in trail:
            circle = list(trail.values())[list(trail).index(_identity(path)) :]
            findings.lose(f"extends goes round in a circle: {' -> '.join([*circle, circle[0]])} ({extended_at})")
            break
    merged = layers.pop()
    while layers:
        merged = inherit(merged, layers.pop())
    return merged


def inherit(parent: Tree, child: Tree) -> Tree:
    """Return the keys of a recipe (`child`) merged over the keys of the recipe that it extends (`parent`).

    If the two recipes have different compression methods, inherited parameters that the new method does not have are
    left out.
    """
    method = scalar_at(child, METHOD)
    before = scalar_at(parent, METHOD) or CacheSection.model_fields["method"].default
    inherited = get(parent, PARAMETERS)
    if isinstance(method, str) and method in all_methods() and method != before and isinstance(inherited, Tree):
        # Parameters belong to the method that they were written for. YAML cannot delete a key, so without this a
        # recipe with parameters could not be extended with another method.
        kept = {name: entry for name, entry in inherited.entries.items() if name in all_methods()[method].model_fields}
        cache = parent.entries["cache"]
        assert isinstance(cache, Tree)
        cache = replace(cache, entries={**cache.entries, "parameters": replace(inherited, entries=kept)})
        parent = replace(parent, entries={**parent.entries, "cache": cache})
    return merge(parent, child)
