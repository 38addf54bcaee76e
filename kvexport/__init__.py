"""kvexport: a Hugging Face checkpoint becomes an engine whose KV cache has a fixed budget.

    path = kvexport.build("tiny-keepkv", "artifacts/tiny")   # once; needs the extra `export`
    engine = kvexport.load(path)                             # needs neither torch nor transformers
    print(engine.generate("hello")[0].text)

Importing this package imports none of its dependencies; they come with the first name that needs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.version import __version__

if TYPE_CHECKING:
    from kvexport.engine.completion import Completion
    from kvexport.engine.engine import Engine, load
    from kvexport.engine.request import Request
    from kvexport.errors import KvexportError
    from kvexport.language.settings import GenerationSettings
    from kvexport.language.token import Token
    from kvexport.recipe.fields import Recipe

__all__ = [
    "Completion",
    "Engine",
    "GenerationSettings",
    "KvexportError",
    "Request",
    "Token",
    "__version__",
    "build",
    "load",
]

_HOMES = {
    "Completion": "kvexport.engine.completion",
    "Engine": "kvexport.engine.engine",
    "GenerationSettings": "kvexport.language.settings",
    "KvexportError": "kvexport.errors",
    "Request": "kvexport.engine.request",
    "Token": "kvexport.language.token",
    "load": "kvexport.engine.engine",
}


def build(recipe: str | Path | Recipe, out: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Build an artifact into the directory `out` and return it; an artifact that was there is replaced at the very end.

    recipe: the name of a shipped recipe, the path of a recipe's file, or a `Recipe`. overrides: "dotted.key=value", as
    `--set`; for names and files only. Raises UsageError (recipe, checkpoint, target) and EnvironmentProblem (disk full,
    missing package).
    """
    from kvexport.packages import require

    require("build")
    from kvexport.errors import UsageError
    from kvexport.export.build import build as build_recipe
    from kvexport.recipe.fields import Recipe
    from kvexport.recipe.load import load_recipe

    if isinstance(recipe, Recipe):
        if overrides:
            raise UsageError(
                "overrides go over a recipe's name or file, this is a Recipe", "recipe.model_copy(update=...)"
            )
        return build_recipe(recipe, Path(out))
    loaded = load_recipe(str(recipe), overrides)
    return build_recipe(loaded.recipe, Path(out), name=loaded.name)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
