"""Perturbation telemetry of a PyTorch reference run: how its merges change attention outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.engine.lanes import Lanes
from kvexport.recipe.fields import Recipe
from kvexport.validate.backend import ReferenceBackend
from kvexport.validate.perturbation import Perturbation
from kvexport.validate.reference import TorchReference
from kvexport.validate.telemetry import Telemetry
from kvexport.validate.tokens import continued_prompts, schedule


def watch(reference: TorchReference, recipe: Recipe, tokens: list[NDArray[np.int64]]) -> list[Perturbation]:
    """Run the PyTorch reference over sequences in one batch, and return how each merge changes attention outputs.

    Two thirds of each sequence come in chunks, the rest token by token.
    """
    plan, chunk = reference.plan, recipe.export.prefill_chunk
    telemetry = Telemetry(plan, reference.geometry, reference.method)
    backend = ReferenceBackend(reference, plan, len(tokens), telemetry)
    cache, calls = recipe.cache, list(schedule(tokens, chunk))
    shared: dict[str, Any] = {"merge_every": cache.merge_every, "merge_prompts": cache.merge_prompts}
    lanes = Lanes(backend, plan, len(tokens), prefill_chunk=chunk, **shared)
    for i, (call_tokens, prefill) in enumerate(calls):
        lanes.append(call_tokens, prefill=prefill, unread=continued_prompts(calls[i + 1 :]))
    return telemetry.rows()
