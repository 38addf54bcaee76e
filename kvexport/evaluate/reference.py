"""The full cache's predictions, on disk: what every KL is measured against.

A row is a position's log-probabilities over the vocabulary in steps of 1/2048 nat down to -32, two bytes each, since an
error in a log-probability e changes the KL by p e (ln p/q - KL) and should be the same for every token. It is at most
1/2048 nat once the row adds up to 1 again; as it is as often above as below, the mean KL of a text changes by less than
1e-5 of a nat, or of itself where it is larger (tests/evaluate/test_evaluate_reference.py; of eight texts of SmolLM2,
with KLs of .07 to .16, by 2e-6 at the most). The likeliest token stays so: another of the same step is put one step
below it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.digests import file_digests
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.evaluate.files import naming, write_whole
from kvexport.units import format_bytes

STEPS = 2048  # per nat
LOWEST = 65535
_BYTES = 2

Logs = NDArray[np.float64]  # log-probabilities [rows, vocabulary], nats


def log_softmax(logits: NDArray[Any]) -> Logs:
    """Along the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def encode(logs: Logs) -> NDArray[np.uint16]:
    """Log-probabilities as whole numbers of steps below 0."""
    rows, best = np.arange(len(logs)), logs.argmax(-1)
    steps = np.rint(np.minimum(logs * -STEPS, LOWEST)).astype(np.int32)
    highest = steps[rows, best]
    np.maximum(steps, highest[:, None] + 1, out=steps)
    steps[rows, best] = highest
    return steps.astype(np.uint16)


def decode(steps: NDArray[np.uint16]) -> Logs:
    """What `encode` was given, but for rounding; probabilities add up to 1."""
    logs = steps / -float(STEPS)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    return logs


def needed_bytes(rows: int, vocabulary: int) -> int:
    """On disk."""
    return rows * vocabulary * _BYTES


def require_space(folder: Path, needed: int) -> None:
    """Raise EnvironmentProblem where the disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentProblem(
            f"the full cache's predictions take {format_bytes(needed)}, and {folder} has {format_bytes(free)} free",
            "--work DIR on another disk, fewer --samples, or a smaller --length",
        )


@dataclass(frozen=True)
class Reference:
    """The rows of a task's samples, one after another, mapped from a file. starts: the first row of every sample."""

    steps: NDArray[np.uint16]
    starts: tuple[int, ...]

    def logs(self, sample: int, first: int, count: int) -> Logs:
        """Log-probabilities at `count` of a sample's counted positions, from number `first` on."""
        start = self.starts[sample] + first
        return decode(self.steps[start : start + count])


class Writer:
    """A reference while it is written; rows may come in any order."""

    def __init__(self, stream: BinaryIO, path: Path, starts: Sequence[int], vocabulary: int) -> None:
        self._stream, self._path, self._starts, self._width = stream, path, starts, vocabulary * _BYTES

    def put(self, sample: int, first: int, logs: Logs) -> None:
        """Rows of a sample's counted positions, from number `first` on. A full disk is an OSError that names the
        file."""
        with naming(self._path):
            self._stream.seek((self._starts[sample] + first) * self._width)
            self._stream.write(encode(logs).tobytes())


class References:
    """References of tasks in a folder, each named by the digest of the model and the samples that it is of. They
    outlive the run if the folder does."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder, self._vocabulary = folder, vocabulary

    def path(self, key: str) -> Path:
        """The file of the key."""
        return self._folder / f"full-{key[:32]}.logs"

    def open(self, key: str, counts: Sequence[int]) -> Reference | None:
        """What was written under the key for samples of so many counted positions; None where nothing was. Raises
        UsageError where the file is not what was written."""
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
            raise UsageError(f"{path} is not what was written there", f"rm {note}, and the full cache is asked again")
        mapped = np.memmap(path, np.uint16, "r", shape=(total, self._vocabulary))
        return Reference(mapped, _starts(counts))

    @contextmanager
    def write(self, key: str, counts: Sequence[int]) -> Iterator[Writer]:
        """To be filled; it is there under its name when the block ends well. Raises OSError naming the file where the
        disk is full."""
        path = self.path(key)
        part = path.with_suffix(".part")
        with naming(part):
            try:
                with part.open("wb") as stream:
                    yield Writer(stream, part, _starts(counts), self._vocabulary)
                    stream.flush()
                    os.fsync(stream.fileno())
                note = {"key": key, "sha256": self._digest(part)}
                part.replace(path)
                write_whole(path.with_suffix(".json"), json.dumps(note))
            finally:
                part.unlink(missing_ok=True)

    def _digest(self, path: Path) -> str:
        (digest,) = file_digests(self._folder, [path.name])
        return digest


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(start) for start in np.cumsum([0, *counts])[:-1])
