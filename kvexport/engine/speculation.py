"""Speculative decoding: which tokens are drafted. The engine verifies them (`kvexport.engine.calls`).

A draft is a guess that one call of the decoder checks, all of its tokens at once. The row of logits after each drafted
token goes through the sequence's own sampler, as it would without a draft, and the first token that comes out otherwise
than drafted ends the step. So greedy and drawn tokens are those of decoding without drafts, seed by seed, whatever was
drafted, and the chance that a certain drafted token is accepted is the probability that the sampler gives it. (The
rejection sampling of arXiv 2211.17192 and 2302.01318 accepts it as often, but draws other numbers.) A drafter that
draws does so with the numbers that the sampler will use, so that like distributions give like tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.base import LoadedModel
from kvexport.cache import part_plan
from kvexport.engine.cache_drafter import CacheDrafter
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import Request

# The tokens that may follow each of the requests that decode in these lanes, no more than it has room for.
Drafter = Callable[[Sequence[Request], Lanes], list[list[int]]]
LONGEST, SHORTEST = 4, 2  # of the n-grams that are looked for


def drafter_of(manifest: Manifest, model: LoadedModel) -> Drafter | None:
    """What an artifact's recipe drafts with; None where it drafts nothing. Raises UsageError where it cannot draft
    here."""
    speculate = manifest.recipe.speculate
    plan = part_plan(manifest.recipe, manifest.cache)
    if speculate.draft == "cache" and plan is not None:
        return CacheDrafter(manifest, model, plan)
    if speculate.draft is None:
        return None
    return partial(draft_ngrams, tokens=speculate.tokens, max_length=manifest.limits.max_length)


def draft_ngrams(requests: Sequence[Request], lanes: Lanes, *, tokens: int, max_length: int) -> list[list[int]]:
    """Of each request at most so many tokens: those that followed the last n-gram of prompt and answer where it stood
    before."""
    # The last token of an answer is never drafted: the step that verifies the ones before it gives it anyway.
    counts = [min(tokens, request.room(max_length) - 1) for request in requests]
    return [follow(request.seen, count) if count > 0 else [] for request, count in zip(requests, counts, strict=True)]


def follow(ids: NDArray[np.int64], count: int) -> list[int]:
    """The `count` tokens after the latest earlier place where the longest n-gram that ends `ids` [n] stands; where they
    reach the end they repeat. Nothing where no n-gram of at least SHORTEST stands anywhere else."""
    found = np.arange(len(ids) - 1)  # where an n-gram, so far of no tokens, may end
    place = -1
    for n in range(1, min(LONGEST, len(ids)) + 1):
        found = found[found >= n - 1]
        found = found[ids[found - n + 1] == ids[-n]]
        if not found.size:
            break
        if n >= SHORTEST:
            place = int(found[-1])
    if place < 0:
        return []
    return [int(token) for token in np.resize(ids[place + 1 :], count)]
