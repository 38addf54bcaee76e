"""The build of an artifact directory from a recipe, as `kvexport build` runs it."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvexport import backends
from kvexport.artifact.digests import write_manifest
from kvexport.artifact.publish import staging
from kvexport.errors import UsageError
from kvexport.export.forked import forked
from kvexport.export.model.tensors import Checkpoint, ModelShape
from kvexport.plan.cache import CachePlan
from kvexport.plan.memory import MemoryPlan, full_layer_bytes, gpu_bytes
from kvexport.plan.planner import plan_cache
from kvexport.recipe.divergence import Divergence
from kvexport.recipe.fields import MOST, Recipe
from kvexport.schema.state import SMALL
from kvexport.tensor_files.peft import MERGE
from kvexport.terminal import Progress, silent

if TYPE_CHECKING:
    from kvexport.export.weights.write import SharedWeights


def read_model(recipe: Recipe, checkpoint: Checkpoint | None = None, *, weights: bool = True) -> ModelShape:
    checkpoint = checkpoint or _checkpoint_of(recipe, weights=weights)
    import torch

    from kvexport.export.hooks.experts import expert_modules
    from kvexport.export.model.config import load_config
    from kvexport.export.model.hf_model import build_fake
    from kvexport.export.model.probe import probe_layers
    from kvexport.export.model.rotary import read_key_shifts, read_rotary
    from kvexport.quiet import quiet_exporter

    with quiet_exporter():
        config = load_config(str(checkpoint.path), recipe)
        model, mode = build_fake(config, getattr(torch, recipe.model.dtype), recipe.rotary_length)
        backend = backends.get(recipe.backend.name)
        if (problem := backend.operator_problem(recipe, "Experts")) and any(expert_modules(model)):
            raise UsageError(*problem)
        if recipe.adapters.count and not backend.runs_adapters:
            able = " or ".join(b.name for b in backends.all_backends() if b.runs_adapters)
            raise UsageError(
                f"adapters.count is {recipe.adapters.count}, but {backend.name} runs no adapters",
                f"--set backend.name={able}, or {MERGE}",
            )
        layout = probe_layers(model, mode)
        geometry = layout.geometry
        if recipe.cache.positions == "cache" or recipe.cache.build_method().rotary:
            geometry = read_rotary(model, mode, geometry, cache_positions=recipe.cache.positions == "cache")
        elif recipe.cache_dtype in SMALL:
            geometry = read_key_shifts(model, mode, geometry)
    plan = plan_cache(recipe, geometry, *layout[1:])
    recurrent = any(name.startswith("recurrent_state") for layer in plan.states for name in layer.shapes(1))
    if recurrent and (problem := backend.operator_problem(recipe, "LinearAttention")):
        raise UsageError(*problem)
    return ModelShape(checkpoint, model, mode, geometry, plan)


def _checkpoint_of(recipe: Recipe, *, weights: bool = True) -> Checkpoint:
    from kvexport.export.model.checkpoint import open_checkpoint

    return open_checkpoint(recipe.model.path, recipe.model.revision, weights=weights, mmproj=recipe.model.mmproj)


def plan_memory(recipe: Recipe, name: str = "") -> MemoryPlan:
    """Return the memory that a recipe needs, from the checkpoint's headers and a model without weights."""
    from kvexport.packages import require

    require("plan")
    import numpy as np

    from kvexport.backends.adapters import largest_bytes
    from kvexport.export.graph.adapters import projection_sizes
    from kvexport.export.model.hf_model import is_composite
    from kvexport.export.weights.specs import planned_bytes

    shape = read_model(recipe, weights=False)
    # Tied parameters (one tensor in several modules) count once, because parameters() yields them once.
    parameters = sum(parameter.numel() for parameter in shape.model.parameters())
    itemsize = np.dtype(recipe.model.dtype).itemsize
    weights, experts, read = planned_bytes(shape.checkpoint, shape.model, recipe)
    length = recipe.limits.max_length
    full = None if length == MOST else sum(full_layer_bytes(layer, length, itemsize) for layer in shape.geometry)
    targets = projection_sizes(shape.model, shape.mode, recipe.adapters.targets) if recipe.adapters.count else {}
    geometry, adapters = tuple(shape.geometry), largest_bytes(recipe, targets)
    arenas = gpu_bytes(recipe, shape.model.config.get_text_config(), itemsize)
    images = 0
    if is_composite(shape.model.config):
        from kvexport.export.vision import planned_encoder_bytes

        images = planned_encoder_bytes(shape, recipe)
    bytes_of = (parameters, weights, full, experts, read, adapters, arenas, images)
    return MemoryPlan(name, recipe, geometry, shape.plan, *bytes_of)


def build(
    recipe: Recipe,
    out: Path,
    *,
    name: str = "",
    graphs_only: bool = False,
    plan: CachePlan | None = None,
    shared: SharedWeights | None = None,
    divergence: Divergence | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[str, int | None], Progress] = silent,
) -> Path:
    backend = backends.get(recipe.backend.name)
    prepare = None if graphs_only else backend.preparation(recipe)
    with staging(out) as folder, _collector_paused():
        from kvexport.export.texts import check_generation, copy_texts

        with progress("reading the checkpoint", None):
            checkpoint = checkpoint or _checkpoint_of(recipe)
            read = checkpoint.facts()

        def texts() -> bytes:
            copy_texts(checkpoint, folder)
            return b""

        # Another core loads and tries the tokenizer while this one imports torch and transformers, which takes seconds.
        with forked(texts) as copied, progress("reading the model", None):
            from kvexport.export import stages
            from kvexport.export.model.conversion import refuse_unexpected
            from kvexport.export.vision import read_vision

            shape = read_model(recipe, checkpoint)
            if plan is not None:
                shape = shape._replace(plan=plan)
            copied()
            check_generation(checkpoint, stages.vocabulary_of(shape))
            vision = read_vision(shape, recipe) if shared is None else ""
        # A plan of its own is that of a model's first layers, whose checkpoint has the others too.
        left_out = refuse_unexpected(shape.model, checkpoint) if plan is None else []
        specs = stages.choose_weights(shape, recipe, progress, vision, left_out)
        if not isinstance(vision, str) and vision.spec.cut == "patches":
            shape = shape._replace(plan=shape.plan.with_rotary_offset())
        traced = stages.trace_and_write(shape, specs, recipe, folder, shared, progress, vision)
        with progress("writing graphs", None):
            graphs = stages.write_graphs(traced, shape, specs, recipe, folder, vision)
            manifest = stages.describe(recipe, name, shape, graphs, specs, traced, vision)
            manifest = replace(manifest, divergence=divergence)
        if prepare is not None:
            manifest = prepare(folder, manifest, progress)
        if checkpoint.facts() != read:  # new weights would be in an artifact with the fingerprint of the old
            raise UsageError(
                f"the checkpoint {checkpoint.path} was rewritten while it was built",
                "build again when nothing writes it any more",
            )
        write_manifest(folder, manifest.to_json(), known=traced.written.digests)
    return out


def share_weights(recipe: Recipe, folder: Path) -> SharedWeights:
    """Write a checkpoint's weights into `folder`, instead of what is there, so that several builds can link to them."""
    from kvexport.export.weights.specs import weight_specs
    from kvexport.export.weights.write import SharedWeights, write_weights

    shape = read_model(recipe)
    specs = weight_specs(shape.checkpoint, shape.model, recipe)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return SharedWeights(folder, tuple(specs), write_weights(specs, folder, lambda _: None))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector, whose search among millions of live objects takes a sixth of a build."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
