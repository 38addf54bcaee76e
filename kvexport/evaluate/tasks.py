"""The tasks of `kvexport eval`: texts that a model predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvexport.evaluate.language import Ids, Language


@dataclass(frozen=True)
class Sample:
    """A token sequence of an evaluation task, with the positions at which predictions are evaluated.

    Attributes:
        ids: Token ids.
        prompt: The number of ids that are read in chunks; the other ids are read one by one.
        counted: The evaluated positions p, in order. The logits at p are compared with the token ids[p + 1].
    """

    ids: Ids
    prompt: int
    counted: list[int]


def text(language: Language, rng: np.random.Generator, length: int) -> Sample:
    """Predict a text that is read in chunks: perplexity, and KL divergence from the full cache."""
    ids, counted = language.text(rng, length)
    return Sample(ids, len(ids), counted)


def decoded(language: Language, rng: np.random.Generator, length: int) -> Sample:
    """Predict the second half of a text, fed token by token, so that the cache is compressed as in decoding."""
    ids, counted = language.text(rng, length)
    return Sample(ids, length // 2, [p for p in counted if p >= length // 2 - 1])


TASKS: dict[str, Callable[[Language, np.random.Generator, int], Sample]] = {"text": text, "decoded": decoded}


def make_samples(task: str, language: Language, count: int, length: int, seed: int) -> list[Sample]:
    """Return `count` samples of a task; equal for equal seeds."""
    return [TASKS[task](language, np.random.default_rng([seed, length, i]), length) for i in range(count)]
