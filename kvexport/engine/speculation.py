"""Drafters guess the next tokens for speculative decoding; `kvexport.engine.calls` verifies these drafts.

A draft is a guess of the next tokens, which one call of the decoder checks. The row of logits after each drafted token
goes through the sequence's own sampler, as it would without a draft. The first token that differs from the draft ends
the step. Greedy and sampled tokens therefore equal those without drafts, for every seed and every draft. A drafted
token is accepted with the probability that the sampler gives it. (Rejection sampling of arXiv 2211.17192 and 2302.01318
accepts equally often, but draws other random numbers.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import Request

# A function that returns a draft (guessed next tokens) for each decoding request, no longer than its answer may get.
Drafter = Callable[[Sequence[Request], Lanes], list[list[int]]]
LONGEST, SHORTEST = 4, 2  # lengths in tokens of the n-grams that are searched


def drafter_of(manifest: Manifest) -> Drafter | None:
    speculate = manifest.recipe.speculate
    if speculate.draft is None:
        return None
    return partial(draft_ngrams, tokens=speculate.tokens, max_length=manifest.limits.max_length)


def draft_ngrams(requests: Sequence[Request], lanes: Lanes, *, tokens: int, max_length: int) -> list[list[int]]:
    # The last token of an answer is never drafted, because the step that verifies the earlier ones gives it anyway.
    counts = [min(tokens, request.room(max_length) - 1) for request in requests]
    return [follow(request.seen, count) if count > 0 else [] for request, count in zip(requests, counts, strict=True)]


def follow(ids: NDArray[np.int64], count: int) -> list[int]:
    """Find the longest n-gram at the end of `ids` [n] that occurs earlier, and return the `count` tokens after it.

    If the n-gram occurs several times, the latest earlier occurrence counts. If fewer than `count` tokens follow it,
    these tokens are repeated. The result is empty if no n-gram of at least SHORTEST tokens occurs earlier.
    """
    ends = np.arange(len(ids) - 1)  # candidate ends of earlier n-grams
    place = -1
    for n in range(1, min(LONGEST, len(ids)) + 1):
        ends = ends[ends >= n - 1]
        ends = ends[ids[ends - n + 1] == ids[-n]]
        if not ends.size:
            break
        if n >= SHORTEST:
            place = int(ends[-1])
    if place < 0:
        return []
    return [int(token) for token in np.resize(ids[place + 1 :], count)]
