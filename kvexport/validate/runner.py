"""`kvexport validate`: an exported model compared with PyTorch, step by step, in a batch of unequal sequences.

PyTorch makes every call and every merge from the engine's state, so that errors of earlier calls do not add up. Every
merge has to equal PyTorch's merge, or one that float64 makes with float32's rounding errors. Some calls are compared
with float64. The page docs/tasks/validate.md lists the criteria and their reasons.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvexport import backends
from kvexport.artifact.reading import load_manifest
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.packages import require
from kvexport.terminal import Progress, silent
from kvexport.validate.result import ValidationResult
from kvexport.validate.slots import used_plan
from kvexport.validate.tokens import continued_prompts, later_calls, schedule, sequences

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe

WHOLE_CALLS = 3  # calls of each phase (prefill, decode) that are compared with float64
# The allowed mean KL(transformers || engine) in nats before anything is evicted.
FIRST_KL = {"float32": 1e-5, "float16": 1e-2}


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
    from kvexport.export.build import read_model
    from kvexport.validate.compare import FIRST_LAYER, tolerance_of
    from kvexport.validate.comparison import Comparison
    from kvexport.validate.divergence import compared_positions, mean_kl_at, measure_divergence, untouched_positions
    from kvexport.validate.reference import TorchReference, full_logits

    began = time.monotonic()
    manifest = load_manifest(path)
    recipe = manifest.recipe
    runtime = backends.get(backend or recipe.backend.name)
    if checkpoint:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": checkpoint})})
    with progress("loading PyTorch and the engine", None):
        shape = read_model(recipe)
        if shape.checkpoint.fingerprint != manifest.model.fingerprint:
            raise UsageError(
                f"{shape.checkpoint.path} is not the checkpoint of {path}",
                "--checkpoint DIR with the one it was built from",
            )
        engine = load(path, backend=backend, verify=False, float_input=True)
        tokens, texts = sequences(engine, length, batch, seed)
        used = used_plan(engine.plan, max(map(len, tokens)) + recipe.export.prefill_chunk)
        reference = TorchReference(shape.checkpoint, used, shape.geometry, recipe.cache.build_method(), recipe)
    result = ValidationResult(
        artifact=str(path),
        recipe=manifest.name,
        backend=" ".join(filter(None, (runtime.name, runtime.device(recipe)))),
        tokens=[len(t) for t in tokens],
        texts=texts,
        budgets=engine.plan.heads("budget").tolist(),
        tolerance=tolerance_of(FIRST_LAYER, recipe.model.dtype, recipe.cache_dtype)._asdict(),
        operators=runtime.operators(manifest, None),
        first_kl_allowed=FIRST_KL[recipe.model.dtype],
        unmerged=sum(sum(b >= len(tokens[0]) for b in x.budget) for x in engine.plan.caches if x.merges),
    )
    comparison = Comparison(engine, reference, result)
    later = later_calls(manifest.limits, recipe.cache.merge_prompts)
    calls = list(schedule(tokens, recipe.export.prefill_chunk, later))
    chosen = _spread([prefill for _, prefill in calls])
    with progress(f"comparing {len(calls)} calls", len(calls)) as bar:
        for i, (call, prefill) in enumerate(calls):
            unread = continued_prompts(calls[i + 1 :])
            comparison.step(call, prefill=prefill, unread=unread, in_float64=i in chosen)
            bar.advance(1)
    comparison.finish()
    with progress("comparing with the uncompressed model", None):
        own = comparison.logits
        positions = compared_positions(own, result.budgets)
        untouched = untouched_positions(own, result.budgets if _is_exact(recipe, shape.model.config) else [0])
        every = [sorted({*a, *b}) for a, b in zip(positions, untouched, strict=True)]
        del engine, reference, comparison  # frees memory for the uncompressed model
        full = full_logits(shape.checkpoint, recipe, tokens, every)
        measure_divergence(result, tokens, positions, own, full)
        result.first_kl, result.first_compared = mean_kl_at(untouched, own, full)
    result.seconds = time.monotonic() - began
    return result


def _is_exact(recipe: Recipe, config: Any) -> bool:
    """Return whether the engine must give the same logits as transformers' own model until an entry is evicted.

    It need not if the KV cache is quantized, if decode steps read only a part of it, or if rotary frequencies that
    depend on the length are fixed.
    """
    from kvexport.export.model.hf_model import length_notes

    rounds, selects = recipe.cache.dtype != "model", recipe.cache.periodic.slots is not None
    return not (rounds or selects or length_notes(config, recipe.rotary_length))


def _spread(prefill: list[bool]) -> set[int]:
    """Return the numbers of `WHOLE_CALLS` calls of each phase, from its first call to its last."""
    calls: set[int] = set()
    for phase in (True, False):
        of_phase = [i for i, p in enumerate(prefill) if p == phase]
        if of_phase:
            calls |= {of_phase[i] for i in np.linspace(0, len(of_phase) - 1, WHOLE_CALLS).astype(int).tolist()}
    return calls
