"""The measured budgets of a build: shares of KV heads, or the reason why budgets are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvexport import backends
from kvexport.allocation import least_slots
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import LoadedRecipe
from kvexport.terminal import Progress, say, silent

MOST_SECONDS = 1800.0  # a longer calibration runs only if the user asks for it
COST = "at equal bytes they lose about twice as much as measured budgets (kvexport docs measurements/budgets)"

Show = Callable[[str, "int | None"], Progress]


def with_measured_budgets(
    loaded: LoadedRecipe,
    changed: Callable[[Sequence[str]], LoadedRecipe],
    *,
    calibrate: bool | None = None,
    progress: Show = silent,
) -> LoadedRecipe:
    """Return a recipe with measured budgets, or the unchanged recipe and a line for the user if none can be had."""
    recipe = loaded.recipe
    if calibrate is False or not _has_a_choice(loaded):
        return loaded
    try:
        settings = _measured_settings(recipe, None if calibrate else MOST_SECONDS, progress)
        from kvexport.export.build import read_model

        measured = changed(settings)
        read_model(measured.recipe, weights=False)  # some recipes cannot have budgets of single heads
        return measured
    except (UsageError, EnvironmentProblem) as error:
        if calibrate:
            raise
        say(f"budgets are equal in all layers and KV heads, because {error.problem}; {COST}")
        return loaded


def _has_a_choice(loaded: LoadedRecipe) -> bool:
    """Return whether the recipe does not divide the budget itself, and the cache evicts entries."""
    cache, limits = loaded.recipe.cache, loaded.recipe.limits
    own = any(place != "default" for key, place in loaded.origin.items() if key.startswith("cache.allocation"))
    evicts = cache.build_method().compresses and loaded.recipe.budget < limits.max_length
    return evicts and not own and cache.positions == "absolute" and cache.build_method().allocation == "uniform"


def _measured_settings(recipe: Recipe, most_seconds: float | None, progress: Show) -> list[str]:
    """Return the settings of a recipe with measured budgets."""
    from kvexport.calibrate.texts import LENGTH, read_kinds, tokenized
    from kvexport.export.model.checkpoint import resolve_checkpoint

    if recipe.cache.dtype != "model" and backends.get(recipe.backend.name).needs_gpu(recipe):
        problem = f"cache.dtype is {recipe.cache.dtype}: a merge on a GPU would be an ONNX function for each KV head"
        raise UsageError(problem, "--set cache.dtype=model, or no --calibrate")
    least = math.ceil(least_slots(recipe))
    if recipe.budget <= least:
        problem = f"{recipe.budget} slots leave no choice: sinks, recent slots and two more take {least} of each head"
        raise UsageError(problem, f"--budget {2 * least}, or more")
    length = min(LENGTH, recipe.limits.max_length)
    with progress("reading the checkpoint", None):
        folder = resolve_checkpoint(recipe.model.path, recipe.model.revision)
        if folder.is_dir():
            tokenized(folder, read_kinds(), length)  # before the model is read
        from kvexport.export.build import read_model

        shape = read_model(recipe)
    from kvexport.calibrate.head_shares import grouped, head_shares_of, samples_of
    from kvexport.calibrate.measured import measure

    samples = samples_of(shape.checkpoint.path, length)
    measured = grouped(measure(recipe, shape, samples, length, progress, most_seconds))
    share = recipe.budget / recipe.limits.max_length * length
    slots = min(max(round(share), length // 16, least + 1), length // 2)
    shares, _ = head_shares_of(measured, slots, least)
    return ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"]
