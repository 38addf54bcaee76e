"""The compression settings that an evaluation compares: methods with parameters, at budgets of equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvexport.errors import UsageError
from kvexport.plan.cache import CachePlan, LayerGeometry
from kvexport.plan.planner import plan_cache, settled_plan
from kvexport.recipe.fields import MOST, Recipe
from kvexport.recipe.load import load_recipe

FULL = "full"


@dataclass(frozen=True)
class Setting:
    label: str  # method as the user wrote it, such as "keepkv:threshold=0.7"
    budget: float | None  # budget as the user wrote it: a share of the run's length, or slots; None for the full cache
    slots: int  # mean number of slots of a layer that fit into the budget's bytes
    bytes: int  # bytes of the whole state of one sequence
    recipe: Recipe


def parse_budgets(text: str) -> list[float]:
    """Return the KV-cache budgets in a list such as "0.125, 1/4, 64".

    Numbers up to 1 are shares of the prompt's length, larger numbers are slots.
    """
    budgets = []
    for word in text.split(","):
        top, slash, bottom = word.strip().partition("/")
        try:
            value = float(top) / float(bottom) if slash else float(top)
        except (ValueError, ZeroDivisionError):
            value = -1.0
        if not 0 < value <= MOST or (slash and value > 1) or (value > 1 and value != int(value)):
            raise UsageError(f"{word.strip()!r} is no budget", "--budgets 1/8,1/4,64: shares of the length, or slots")
        budgets.append(value)
    return sorted(set(budgets))


def overrides_of(label: str) -> list[str]:
    """Return the recipe settings (as for `--set`) of a method label such as "keepkv:threshold=0.7"."""
    method, *pairs = label.split(":")
    lines = [f"cache.method={method}"]
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(
                f"{label!r}: {pair!r} is not a setting", "NAME or NAME:key=value, such as keepkv:threshold=0.7"
            )
        lines.append(f"{key if '.' in key else f'cache.parameters.{key}'}={value}")
    return lines


def load_setting(recipe: str, label: str, slots: int | None, common: Sequence[str]) -> Recipe:
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
    """Return every compression method at every budget, with KV caches of equal bytes.

    For each budget, the method with the smallest cache of that many slots sets the number of bytes, and every other
    method gets as many slots as fit into these bytes. The bytes of token counts (votes), scores, positions and free
    slots count. A cache that is compressed only after the prompt counts with its bytes after the prompt.
    """
    settings = []
    for budget in budgets:
        slots = max(1, round(budget * length)) if budget <= 1 else int(budget)
        recipes = {label: load_setting(recipe, label, slots, common) for label in labels}
        limit = min(_settled(r, geometry).bytes() for r in recipes.values())
        for label, loaded in recipes.items():
            fitted, plan = _fit(loaded, slots, limit, geometry)
            settings.append(Setting(label, float(budget), fitted.budget, plan.bytes(), fitted))
    return settings


def _settled(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> CachePlan:
    return settled_plan(recipe, plan_cache(recipe, geometry))


def _fit(recipe: Recipe, slots: int, limit: int, geometry: Sequence[LayerGeometry]) -> tuple[Recipe, CachePlan]:
    plan = _settled(recipe, geometry)
    while plan.bytes() > limit:
        # The bytes of a cache are linear in its slots, except for rounding between layers.
        slots = min(slots - 1, slots * limit // plan.bytes())
        recipe = recipe.model_copy(update={"cache": recipe.cache.model_copy(update={"budget": slots})})
        plan = _settled(recipe, geometry)
    return recipe, plan
