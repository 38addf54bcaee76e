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

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.files import file_digests, new_file, write_file
from kvexport.units import format_bytes

STEPS = 2048  # per nat
LOWEST = 65535
_BYTES = 2

Logs = NDArray[np.float64]  # log-probabilities [rows, vocabulary], nats


def log_softmax(logits: NDArray[Any]) -> Logs:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def encode(logs: Logs) -> NDArray[np.uint16]:
    """Quantize log-probabilities to uint16: whole steps of 1/2048 nat below 0."""
    rows, best = np.arange(len(logs)), logs.argmax(-1)
    steps = np.rint(np.minimum(logs * -STEPS, LOWEST)).astype(np.int32)
    highest = steps[rows, best]
    np.maximum(steps, highest[:, None] + 1, out=steps)
    steps[rows, best] = highest
    return steps.astype(np.uint16)


def decode(steps: NDArray[np.uint16]) -> Logs:
    """Return log-probabilities from the uint16 steps of `encode`, normalized so that the probabilities sum to 1."""
    logs = steps / -float(STEPS)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    return logs


def needed_bytes(rows: int, vocabulary: int) -> int:
    return rows * vocabulary * _BYTES


def require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentProblem(
            f"the full cache's predictions take {format_bytes(needed)}, and {folder} has {format_bytes(free)} free",
            "--work DIR on another disk, fewer --samples, or a smaller --length",
        )


@dataclass(frozen=True)
class Reference:
    """The full KV cache's log-probabilities at the evaluated positions of a task's samples, in a memory-mapped file."""

    steps: NDArray[np.uint16]
    starts: tuple[int, ...]  # first row of every sample

    def logs(self, sample: int, first: int, count: int) -> Logs:
        start = self.starts[sample] + first
        return decode(self.steps[start : start + count])


class Writer:
    """Writer of a file with the full KV cache's log-probabilities of tokens; positions may come in any order."""

    def __init__(self, stream: BinaryIO, starts: Sequence[int], vocabulary: int) -> None:
        self._stream, self._starts, self._width = stream, starts, vocabulary * _BYTES

    def put(self, sample: int, first: int, logs: Logs) -> None:
        self._stream.seek((self._starts[sample] + first) * self._width)
        self._stream.write(encode(logs).tobytes())


class References:
    """A folder of files with the full KV cache's predictions, each named by the digest of its model and samples."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder, self._vocabulary = folder, vocabulary

    def path(self, key: str) -> Path:
        return self._folder / f"full-{key[:32]}.logs"

    def open(self, key: str, counts: Sequence[int]) -> Reference | None:
        path = self.path(key)
        note = path.with_suffix(".json")
        if not note.exists():
            return None
        total = sum(counts)
        try:
            written = json.loads(note.read_text(encoding="utf-8"))
            whole = path.stat().st_size == needed_bytes(total, self._vocabulary)
            whole = whole and written == {"key": key, "sha256": self._digest(path)}
        except (OSError, ValueError):
            whole = False
        if not whole:
            raise UsageError(
                f"{path} is damaged: its digest does not match",
                f"rm {shlex.quote(str(note))}, and the full cache runs again",
            )
        mapped = np.memmap(path, np.uint16, "r", shape=(total, self._vocabulary))
        return Reference(mapped, _starts(counts))

    @contextmanager
    def write(self, key: str, counts: Sequence[int]) -> Iterator[Writer]:
        """Yield a writer of the file with the full KV cache's predictions for the digest `key`.

        The file gets its name when the block ends without an error.
        """
        path = self.path(key)
        note = path.with_suffix(".json")
        note.unlink(missing_ok=True)  # of older predictions: without a note, a killed run measures again
        with new_file(path) as stream:
            yield Writer(stream, _starts(counts), self._vocabulary)
        write_file(note, json.dumps({"key": key, "sha256": self._digest(path)}))

    def _digest(self, path: Path) -> str:
        (digest,) = file_digests(self._folder, [path.name])
        return digest


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(start) for start in np.cumsum([0, *counts])[:-1])
