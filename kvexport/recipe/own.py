"""The recipe of a model without a recipe file: a checkpoint, a budget, and defaults for all other keys."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from kvexport.recipe.inherit import inherit
from kvexport.recipe.load import LoadedRecipe, checked
from kvexport.recipe.override import read_overrides
from kvexport.recipe.parse import Findings

BUDGET = 1024
METHOD = "ballot"  # the lowest loss of the methods at equal bytes on most tasks; docs/measurements/quality.md


def recipe_for(
    model: str, budget: int = BUDGET, *, max_length: int | None = None, overrides: Sequence[str] = ()
) -> LoadedRecipe:
    """Return the recipe of a checkpoint that has no recipe file.

    Every KV cache of the model gets the same budget of slots; `kvexport.models.calibrated_recipe` measures budgets.

    Args:
        model: A hub id, the path of a checkpoint's folder, or the path of a GGUF file.
        budget: Slots of each KV head.
        max_length: The largest number of tokens of one sequence; None takes the default of `limits.max_length`.
        overrides: "dotted.key=value" strings, as for `--set`. They take precedence over the other arguments.

    Raises:
        UsageError: An argument is not allowed in a recipe. The message lists every problem.
    """
    settings = [f"model.path={json.dumps(model)}", f"cache.method={METHOD}", f"cache.budget={budget}"]
    if max_length is not None:
        settings.append(f"limits.max_length={max_length}")
    findings = Findings()
    tree = inherit(read_overrides(settings, findings), read_overrides(overrides, findings))
    return checked(tree, f"the recipe of {model}", name_of(model), findings)


def name_of(model: str) -> str:
    """Return a short name for a model: the last component of its hub id or path, without ".gguf"."""
    last = Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "-", last.removesuffix(".gguf")) or "model"
