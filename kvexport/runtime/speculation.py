"""Speculative decoding: which tokens are drafted. The engine verifies them (`Engine._verify`).

A draft is a guess that one call of the decoder checks, all of its tokens at once. The row of logits after each drafted
token goes through the sequence's own sampler, as it would without a draft, and the first token that comes out otherwise
than drafted ends the step. So greedy and drawn tokens are those of decoding without drafts, seed by seed, whatever was
drafted, and the chance that a drafted token is accepted is the probability that the sampler gives it. (The rejection
sampling of arXiv 2211.17192 and 2302.01318 accepts a token of a certain draft as often, but draws other numbers.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.runtime.request import Request

Drafter = Callable[[Request], list[int]]  # the tokens that may follow; empty: none are guessed
LONGEST, SHORTEST = 4, 2  # of the n-grams that are looked for


def drafter_of(manifest: Manifest) -> Drafter | None:
    """What an artifact's recipe drafts with; None where it drafts nothing."""
    speculate = manifest.recipe.speculate
    if speculate.draft is None:
        return None
    return partial(draft_ngram, tokens=speculate.tokens, max_length=manifest.limits.max_length)


def draft_ngram(request: Request, *, tokens: int, max_length: int) -> list[int]:
    """At most so many tokens, and no more than the answer has room for: those that followed the last n-gram of prompt
    and answer where it stood before."""
    ids, generated = request.ids, [token.id for token in request.tokens]
    settings, seen = request.sampler.settings, len(ids) + len(generated)
    # The last token of an answer is never drafted: the step that verifies the ones before it gives it anyway.
    left = min(settings.max_new_tokens - len(request.sampler.generated), max_length - seen) - 1
    if (count := min(tokens, left)) < 1:
        return []
    return follow(np.concatenate([ids, np.array(generated, np.int64)]), count)


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
