"""`kvexport validate`: an exported model compared with PyTorch, step by step, in a batch of unequal sequences.

Every layer receives PyTorch's hidden state and KV cache, so that errors of earlier layers do not add up. Every merge
has to equal PyTorch's merge, or one that float64 makes with float32's rounding errors. The full depth of the model is
compared with float64. The engine also runs independently and in place, as in production. The page
docs/tasks/validate.md lists the criteria and their reasons.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvexport import backends
from kvexport.artifact.reading import load_manifest
from kvexport.engine.load import load
from kvexport.machine import TORCH_BYTES, release_mapped, require_memory
from kvexport.packages import require
from kvexport.recipe.fields import Recipe
from kvexport.terminal import Progress, silent
from kvexport.units import format_bytes, format_seconds
from kvexport.validate.layers import require_checkpoint
from kvexport.validate.result import ValidationResult
from kvexport.validate.slots import used_plan
from kvexport.validate.tokens import (
    COPIES,
    IMAGE,
    Ids,
    continued_prompts,
    default_batch,
    later_calls,
    schedule,
    sequences,
)

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest
    from kvexport.validate.reference import TorchReference

WHOLE_CALLS = 3  # calls of each phase (prefill, decode) that are compared with float64 and in place
PACKED_BYTES = 1.1  # memory of a number of a packed weight in PyTorch, and its share of a scale
FLOAT64 = 4.0  # duration of a call in float64, as a multiple of the reference's
# The allowed mean KL(PyTorch || engine) of independent runs in nats. SmolLM2 in float32 has 1e-9 without ties in
# merges, and 1e-7 with some.
OWN_KL = {"float32": 1e-5, "float16": 1e-2}


def validate_artifact(
    path: Path,
    *,
    length: int | None = None,
    batch: int | None = None,
    checkpoint: str | None = None,
    seed: int = 0,
    backend: str | None = None,
    progress: Callable[[str, int | None], Progress] = silent,
) -> ValidationResult:
    require("validate")
    from polygraphy.logger import G_LOGGER

    from kvexport.export.build import read_model
    from kvexport.export.weights.write import DATA_FILE
    from kvexport.validate.compare import LAYERS, tolerance_of
    from kvexport.validate.comparison import Comparison
    from kvexport.validate.cut import CutDecoder
    from kvexport.validate.divergence import compared_positions, mean_kl_at, measure_divergence, untouched_positions
    from kvexport.validate.images import make_picture
    from kvexport.validate.reference import TorchReference, full_logits
    from kvexport.validate.shipped import shipped_difference

    began = time.monotonic()
    manifest = load_manifest(path)
    recipe = manifest.recipe
    runtime = backends.get(backend or recipe.backend.name)
    where = runtime.device(recipe)
    if checkpoint:
        named: dict[str, Any] = {"path": checkpoint}
        if recipe.model.mmproj:  # the encoder of a GGUF file moved with it
            named["mmproj"] = str(Path(checkpoint).with_name(Path(recipe.model.mmproj).name))
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=named)})
    with progress("reading the model", None):
        shape = read_model(recipe)
        require_checkpoint(shape.checkpoint, manifest, path)
        parameters = sum(x.numel() for x in shape.model.parameters())
        if batch is None:
            batch = default_batch(manifest.cache, manifest.limits, parameters)
        needed = _memory(manifest, parameters, batch)
    require_memory(needed, "the comparison with PyTorch", "--batch 1, or a machine with more memory")
    with progress(f"loading PyTorch and the engine, which take about {format_bytes(needed)} of memory", None):
        # CUDA graphs are off, because a captured one reads its inputs from fixed addresses, and here every call has its
        # own buffers. `shipped_difference` compares answers with graphs.
        engine = load(path, backend=backend, cuda_graph=False, verify=False, float_input=True)
        method = recipe.cache.build_method()
        picture = make_picture(engine, seed)
        later = later_calls(manifest.limits, recipe.cache.merge_prompts, parameters)
        image_ids = () if picture is None else picture.ids.tolist()
        tokens, texts = sequences(engine, length, batch, seed, sum(later), image_ids)
        used = used_plan(engine.plan, max(map(len, tokens)) + recipe.export.prefill_chunk)
        row_size = 0 if manifest.images is None else manifest.images.hidden
        runners, cut = runtime.runners(engine.model, manifest), None
        if runners.open_decoder is not None:
            slots = engine.plan if used != engine.plan else None
            cut = CutDecoder(path / manifest.graphs.decoder, recipe.model.dtype, runners.open_decoder, slots)
        # Both sessions have copied the weights into the layouts of their kernels, before PyTorch reads its own.
        release_mapped(path / DATA_FILE)
        reference = TorchReference(shape.checkpoint, used, shape.geometry, method, recipe, row_size)
    tolerance = asdict(tolerance_of(LAYERS, recipe.model.dtype, recipe.cache_dtype))
    tolerance.pop("rounding")
    result = ValidationResult(
        artifact=str(path),
        recipe=manifest.name,
        backend=runtime.name if where is None else f"{runtime.name} {where}",
        tokens=[len(t) for t in tokens],
        texts=texts,
        budgets=engine.plan.heads("budget").tolist(),
        tolerance=tolerance,
        operators=runtime.operators(manifest),
        own_kl_allowed=OWN_KL[recipe.model.dtype],
        unmerged=sum(sum(b >= len(tokens[0]) for b in x.budget) for x in engine.plan.caches if x.merges),
    )
    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    comparison, pixels = Comparison(engine, runners, cut, reference, result), {}
    if picture is not None and texts[0].startswith(IMAGE):
        with progress("encoding an image", None):
            pixels = picture.arguments(shape.checkpoint, shape.model.config)
            comparison.encode(picture, pixels)
    elif picture is not None:
        result.no_image = len(picture.ids)
    borders = picture.borders(recipe.export.prefill_chunk) if pixels and picture is not None else []
    calls = list(schedule(tokens, recipe.export.prefill_chunk, later, borders))
    whole = _whole_calls([prefill for _, prefill in calls])
    about = _estimate(reference, calls, len(whole))
    with progress(f"comparing {len(calls)} calls, {about}", len(calls)) as bar:
        for i, (call_tokens, prefill) in enumerate(calls):
            comparison.step(call_tokens, prefill=prefill, unread=continued_prompts(calls[i + 1 :]), whole=i in whole)
            bar.advance(1)
    comparison.finish()
    with progress("comparing with the uncompressed model", None):
        own = comparison.independent.logits
        budgets = result.budgets or [recipe.limits.max_length]  # without attention nothing is evicted
        positions = compared_positions(own, budgets)
        untouched = untouched_positions(own, budgets if _is_exact(recipe, shape.model.config) else [0])
        every = [sorted({*a, *b}) for a, b in zip(positions, untouched, strict=True)]
        del engine, runners, cut, reference, comparison  # frees memory for the uncompressed model
        full = full_logits(shape.checkpoint, recipe, tokens, every, pixels)
        measure_divergence(result, tokens, positions, own, full)
        result.first_kl, result.first_compared = mean_kl_at(untouched, own, full)
    if where != "cpu":
        spec = manifest.images  # these answers read no picture
        alone = [ids if spec is None else ids[ids != spec.token] for ids in tokens]
        with progress("comparing answers with and without CUDA graphs", None):
            result.shipped_difference = shipped_difference(
                lambda graphs: load(path, backend=backend, cuda_graph=graphs, verify=False), alone
            )
    result.seconds = time.monotonic() - began
    return result


def _is_exact(recipe: Recipe, config: Any) -> bool:
    """Return whether the engine must give transformers' logits until it evicts: unrounded, whole and unscaled."""
    from kvexport.export.model.hf_model import length_notes

    rounds, selects = recipe.cache.dtype != "model", recipe.cache.periodic.slots is not None
    return not (rounds or selects or length_notes(config, recipe.rotary_length))


def _whole_calls(prefill: list[bool]) -> set[int]:
    calls: set[int] = set()
    for phase in (True, False):
        of_phase = [i for i, p in enumerate(prefill) if p == phase]
        if of_phase:
            calls |= {of_phase[i] for i in np.linspace(0, len(of_phase) - 1, WHOLE_CALLS).astype(int).tolist()}
    return calls


def _memory(manifest: Manifest, parameters: int, batch: int) -> int:
    weights = parameters * (PACKED_BYTES if manifest.model.packed else np.dtype(manifest.recipe.model.dtype).itemsize)
    return TORCH_BYTES + 2 * manifest.bytes + int(weights) + COPIES * manifest.cache.bytes(batch)


def _estimate(reference: TorchReference, calls: list[tuple[list[Ids], bool]], whole: int) -> str:
    seconds = 0.0
    for phase in (True, False):
        of_phase = [call_tokens for call_tokens, prefill in calls if prefill == phase]
        if of_phase:
            widest = max(of_phase, key=lambda call_tokens: max(map(len, call_tokens)))
            trial = reference.time_decode(len(widest), max(map(len, widest)))
            seconds += trial * (2.0 * len(of_phase) + FLOAT64 * whole / 2)
    return f"about {format_seconds(seconds)}"
