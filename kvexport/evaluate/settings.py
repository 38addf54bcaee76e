"""What is compared: methods with their parameters, at budgets of equal bytes, each built into an artifact."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.cache import CachePlan, LayerGeometry, plan_cache, settled_plan
from kvexport.errors import UsageError
from kvexport.recipe.fields import MOST, Recipe
from kvexport.recipe.load import load_recipe

FULL = "full"


@dataclass(frozen=True)
class Setting:
    """A method with its parameters, at one budget. label: the method as it was asked for, "keepkv:threshold=0.7".
    budget: as asked for, a share of the run's length or slots. slots: of a layer on average, the most whose bytes do
    not exceed the budget's. bytes: of one sequence's whole state."""

    label: str
    budget: float
    slots: int
    bytes: int
    recipe: Recipe


def parse_budgets(text: str) -> list[float]:
    """ "0.125, 1/4, 64": shares of the length, below 1 or with a slash, and slots. Raises UsageError."""
    budgets = []
    for part in text.split(","):
        top, slash, bottom = part.strip().partition("/")
        try:
            value = float(top) / float(bottom) if slash else float(top)
        except (ValueError, ZeroDivisionError):
            value = -1.0
        if not 0 < value <= MOST or (slash and value > 1) or (value > 1 and value != int(value)):
            raise UsageError(f"{part.strip()!r} is no budget", "--budgets 1/8,1/4,64: shares of the length, or slots")
        budgets.append(value)
    return sorted(set(budgets))


def overrides_of(label: str) -> list[str]:
    """The `--set` lines of "method:key=value:...": a key without a dot is a parameter of the method."""
    method, *parts = label.split(":")
    lines = [f"cache.method={method}"]
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(
                f"{label!r}: {part!r} is no setting", "NAME or NAME:key=value, such as keepkv:threshold=0.7"
            )
        lines.append(f"{key if '.' in key else f'cache.parameters.{key}'}={value}")
    return lines


def load_setting(recipe: str, label: str, slots: int | None, common: Sequence[str]) -> Recipe:
    """The recipe with a method, its budget (None: what the recipe or the label says) and the settings that all
    share."""
    budget = [] if slots is None else [f"cache.budget={slots}"]
    return load_recipe(recipe, [*common, *overrides_of(label), *budget]).recipe


def equal_bytes(
    recipe: str,
    labels: Sequence[str],
    budgets: Sequence[float],
    length: int,
    geometry: Sequence[LayerGeometry],
    common: Sequence[str],
) -> list[Setting]:
    """Every label at every budget. A budget's bytes are those of the leanest label with that many slots (votes, scores,
    positions and slack counted; of a cache that reads whole prompts what it uses afterwards); every label gets the most
    slots that fit them. Raises UsageError where a budget cannot hold sinks and recent."""
    found = []
    for budget in budgets:
        slots = max(1, round(budget * length)) if budget <= 1 else int(budget)
        recipes = {label: load_setting(recipe, label, slots, common) for label in labels}
        limit = min(_settled(r, geometry).bytes() for r in recipes.values())
        for label, loaded in recipes.items():
            fitted, plan = _fit(loaded, slots, limit, geometry)
            found.append(Setting(label, float(budget), fitted.budget, plan.bytes(), fitted))
    return found


def _settled(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> CachePlan:
    return settled_plan(recipe, plan_cache(recipe, geometry))


def _fit(recipe: Recipe, slots: int, limit: int, geometry: Sequence[LayerGeometry]) -> tuple[Recipe, CachePlan]:
    plan = _settled(recipe, geometry)
    while plan.bytes() > limit:
        # Bytes are linear in slots, but for rounding between layers.
        slots = min(slots - 1, slots * limit // plan.bytes())
        recipe = recipe.model_copy(update={"cache": recipe.cache.model_copy(update={"budget": slots})})
        plan = _settled(recipe, geometry)
    return recipe, plan


def longer_checkpoint(checkpoint: Path, folder: Path, positions: int) -> Path:
    """A checkpoint in `folder` that is `checkpoint` but for its maximum of positions. Its weights are hard links where
    the file system allows it. Raises UsageError where the model's rotary embedding depends on the length."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in ("default", "linear", "llama3"):
        raise UsageError(
            f"the rotary embedding of {checkpoint} is {kind}, which depends on the length", "--tasks without stability"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        target = folder / path.name
        if path.is_file() and path.name != "config.json" and not target.exists():
            try:
                os.link(path.resolve(), target)
            except OSError:
                target.write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return folder
