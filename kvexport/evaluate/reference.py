"""The full KV cache's predictions, stored on disk, for the KL divergences of compressed KV caches.

A file has, for each evaluated position, the log-probabilities of all tokens in steps of 1/2048 nat down to -32, two
bytes each. If the full cache gives a token the probability p and the compressed cache q, an error e in ln p changes the
KL divergence by p e (ln(p/q) - KL). The error should therefore have the same size for every token: it is at most 1/2048
nat after normalization. Errors are positive and negative, so the mean KL over a text changes by less than 1e-5 nat, or
by less than 1e-5 of itself if it is larger (tests/evaluate/test_evaluate_reference.py; at most 2e-6 on eight texts of
SmolLM2 with KLs of .07 to .16). The most likely token stays the most likely: if another token would get the same step,
that token is stored one step lower.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import EnvironmentProblem
from kvexport.units import format_bytes

STEPS = 2048  # per nat
LOWEST = 65535

Logs = NDArray[np.float64]  # log-probabilities [rows, vocabulary], nats


def log_softmax(logits: NDArray[Any]) -> Logs:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def encode(logs: Logs) -> NDArray[np.uint16]:
    """Round log-probabilities to uint16: the number of whole steps of 1/2048 nat below 0."""
    rows, best = np.arange(len(logs)), logs.argmax(-1)
    steps = np.rint(np.minimum(logs * -STEPS, LOWEST)).astype(np.int32)
    highest = steps[rows, best]
    np.maximum(steps, highest[:, None] + 1, out=steps)
    steps[rows, best] = highest
    return steps.astype(np.uint16)


def decode(steps: NDArray[np.uint16]) -> Logs:
    """Reverse `encode`: return log-probabilities from uint16 steps, normalized so that probabilities sum to 1."""
    logs = steps / -float(STEPS)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    return logs


class Reference:
    """The full KV cache's log-probabilities at the evaluated positions of a task's samples, in a file of `folder`."""

    def __init__(self, folder: Path, name: str, counts: Sequence[int], vocabulary: int) -> None:
        shape, path = (sum(counts), vocabulary), folder / f"{name}.logs"
        size = 2 * shape[0] * shape[1]
        try:
            with path.open("wb") as file:
                # On a full disk, a write to a mapped file would end the process.
                if hasattr(os, "posix_fallocate"):  # macOS has none
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        except OSError as error:
            raise EnvironmentProblem(
                f"the full cache's predictions take {format_bytes(size)} in {folder}: {error.strerror or error}",
                "TMPDIR=DIR on another disk, fewer --samples, or a smaller --length",
            ) from error
        self._steps = np.memmap(path, np.uint16, "r+", shape=shape)
        self._starts = np.cumsum([0, *counts])[:-1].tolist()

    def put(self, sample: int, first: int, logs: Logs) -> None:
        start = self._starts[sample] + first
        self._steps[start : start + len(logs)] = encode(logs)

    def logs(self, sample: int, first: int, count: int) -> Logs:
        start = self._starts[sample] + first
        return decode(self._steps[start : start + count])
