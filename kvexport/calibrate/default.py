"""The measured budgets of a build: the share of cache slots that calibration gives each KV head, or equal budgets."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvexport import backends
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.plan.budgets import least_slots
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import LoadedRecipe
from kvexport.terminal import Progress, say, silent

MOST_PARAMETERS = 8e9  # larger models are calibrated only on request, as three texts take half an hour

Show = Callable[[str, "int | None"], Progress]


def with_measured_budgets(
    loaded: LoadedRecipe,
    changed: Callable[[Sequence[str]], LoadedRecipe],
    *,
    calibrate: bool | None = None,
    progress: Show = silent,
) -> LoadedRecipe:
    """Return a recipe with measured budgets, or unchanged if it divides the slots itself or evicts nothing."""
    recipe = loaded.recipe
    if calibrate is False or not _has_a_choice(loaded):
        return loaded
    try:
        return _measured(recipe, changed, bool(calibrate), progress)
    except (UsageError, EnvironmentProblem) as error:
        if calibrate:
            raise
        say(f"budgets are equal in all layers and KV heads, because {error.problem}")
        return loaded


def _has_a_choice(loaded: LoadedRecipe) -> bool:
    cache, limits = loaded.recipe.cache, loaded.recipe.limits
    own = any(place != "default" for key, place in loaded.origin.items() if key.startswith("cache.allocation"))
    evicts = cache.build_method().compresses and loaded.recipe.budget < limits.max_length
    return evicts and not own and cache.positions == "absolute" and cache.build_method().allocation == "uniform"


def _measured(
    recipe: Recipe, changed: Callable[[Sequence[str]], LoadedRecipe], all_texts: bool, progress: Show
) -> LoadedRecipe:
    from kvexport.calibrate.guard import divergence
    from kvexport.calibrate.head_shares import fitted_slots, grouped, head_shares_of, samples_of
    from kvexport.calibrate.measured import device_of, measure
    from kvexport.calibrate.texts import LENGTH, read_kinds, tokenized
    from kvexport.export.model.checkpoint import resolve_checkpoint

    if recipe.cache.dtype != "model" and backends.get(recipe.backend.name).needs_gpu(recipe):
        problem = f"cache.dtype is {recipe.cache.dtype}: a merge on a GPU would be an ONNX function for each KV head"
        raise UsageError(problem, "--set cache.dtype=model, or no --calibrate")
    length = min(LENGTH, recipe.limits.max_length)
    slots = fitted_slots(recipe, length)
    with progress("reading the checkpoint", None):
        folder = resolve_checkpoint(recipe.model.path, recipe.model.revision)
        if folder.is_dir():
            tokenized(folder, read_kinds(), length)  # raises errors before the model is read
        from kvexport.export.build import read_model

        shape = read_model(recipe)
    parameters = sum(p.numel() for p in shape.model.parameters())
    if not all_texts and parameters > MOST_PARAMETERS:
        problem = f"the calibration of {parameters / 1e9:.1f} billion parameters takes more than half an hour"
        raise UsageError(problem, "--calibrate")
    samples = samples_of(shape.checkpoint.path, length)
    measured = grouped(measure(recipe, shape, samples, length, progress, all_texts=all_texts))
    shares, _ = head_shares_of(measured, slots, least_slots(recipe))
    listed = changed(["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"])
    read_model(listed.recipe, weights=False)  # some recipes cannot have caches of different heads, and raise an error
    with progress("comparing with the full cache", None):
        compared = divergence(listed.recipe, shape, next(iter(samples.values())).ids, slots, device_of(shape, length))
    say(compared.line)
    if compared.warning:
        say(f"warning: {compared.warning}")
    return replace(listed, divergence=compared)
