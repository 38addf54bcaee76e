"""Measurement of an engine on samples: its predictions, compared with the true tokens and with the full KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvexport.engine.engine import Engine
from kvexport.errors import UsageError
from kvexport.evaluate.reference import Logs, Reference, log_softmax
from kvexport.evaluate.tasks import Sample

Rows = NDArray[np.float32]  # logits [evaluated positions, vocabulary]
BLOCK = 16  # rows of logits compared at once: 6 MB in float64 for a vocabulary of 50,000


@dataclass(frozen=True)
class Outcome:
    nll: float  # mean -ln p of the evaluated tokens, in nats
    kl: NDArray[np.float64]  # KL(full || engine) at every evaluated position, in nats; empty without a reference
    # Whether the most likely token equals the full cache's, by position; empty without a reference
    agrees: NDArray[np.bool_]


def counted_rows(engine: Engine, samples: Sequence[Sample]) -> Iterator[tuple[int, int, Rows]]:
    """Run samples through an engine in one batch, and yield the logits at every sample's evaluated positions.

    Prompts are read in chunks, then the given tokens one by one. Only the logits of one call are in memory at a time.
    """
    lanes = engine.lanes(len(samples))
    counted = [np.array(sample.counted, dtype=np.int64) for sample in samples]
    done = [0] * len(samples)
    if engine.manifest.recipe.cache.merge_prompts == "end" and any(
        min(s.counted, default=s.prompt) < s.prompt - 1 for s in samples
    ):
        problem = "cache.merge_prompts is end, and the task evaluates tokens inside a prompt, before any merge"
        raise UsageError(problem, "--tasks decoded")

    def append(chunks: list[NDArray[np.int64]], unread: list[int] | None) -> Iterator[tuple[int, int, Rows]]:
        prefill = unread is not None
        logits = lanes.append(chunks, prefill=prefill, unread=unread or ())
        for lane, ids in enumerate(chunks):
            first, end = np.searchsorted(counted[lane], (done[lane], done[lane] + len(ids)))
            offsets = counted[lane][first:end] - done[lane]
            if logits.shape[1] == 1 and (offsets != len(ids) - 1).any():
                problem = f"{engine.path} returns the logits of a call's last token only"
                raise UsageError(problem, engine.manifest.build_command("export.logits=all"))
            done[lane] += len(ids)
            if len(offsets):
                yield lane, int(first), logits[lane, np.minimum(offsets, logits.shape[1] - 1)]

    ids = [np.array(sample.ids, dtype=np.int64) for sample in samples]
    chunk = lanes.prefill_chunk
    for start in range(0, max(sample.prompt for sample in samples), chunk):
        chunks = [i[start : min(start + chunk, s.prompt)] for i, s in zip(ids, samples, strict=True)]
        yield from append(chunks, [lane for lane, s in enumerate(samples) if s.prompt > start + chunk])
    # No position after the last token is evaluated.
    rest = [i[s.prompt : max(s.counted, default=-1) + 1] for i, s in zip(ids, samples, strict=True)]
    for step in range(max(map(len, rest))):
        yield from append([r[step : step + 1] for r in rest], None)


class Judge:
    """Accumulator that compares a sample's predictions with the true tokens and with the full KV cache's predictions.

    Rows of logits may come in pieces, each row once.
    """

    def __init__(self, sample: Sample, against: Callable[[int, int], Logs] | None) -> None:
        self._truth = np.array([sample.ids[p + 1] for p in sample.counted])
        self._against = against
        count = len(self._truth)
        self._nll = np.zeros(count)
        compared = 0 if against is None else count
        self._kl, self._agrees = np.zeros(compared), np.zeros(compared, bool)

    def take(self, first: int, logs: Logs) -> None:
        rows = np.arange(first, first + len(logs))
        self._nll[rows] = -logs[np.arange(len(rows)), self._truth[rows]]
        if self._against is not None:
            reference = self._against(first, len(rows))
            # Rounding makes the KL of equal rows about -1e-16.
            self._kl[rows] = np.maximum((np.exp(reference) * (reference - logs)).sum(-1), 0.0)
            self._agrees[rows] = logs.argmax(-1) == reference.argmax(-1)

    def outcome(self) -> Outcome:
        return Outcome(float(self._nll.mean()), self._kl, self._agrees)


def run_samples(
    engine: Engine,
    samples: Sequence[Sample],
    batch: int,
    *,
    reference: Reference | None = None,
    writer: Reference | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Outcome]:
    outcomes = []
    for start in range(0, len(samples), batch):
        batch_samples = samples[start : start + batch]
        judges = [
            Judge(sample, None if reference is None else partial(reference.logs, start + lane))
            for lane, sample in enumerate(batch_samples)
        ]
        for lane, first, rows in counted_rows(engine, batch_samples):
            for block in range(0, len(rows), BLOCK):
                logs = log_softmax(rows[block : block + BLOCK])
                judges[lane].take(first + block, logs)
                if writer is not None:
                    writer.put(start + lane, first + block, logs)
        outcomes += [judge.outcome() for judge in judges]
        advance(len(batch_samples))
    return outcomes
