"""Samples through an engine: what it predicts where an answer stands, against the truth and against the full cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import stored_rows
from kvexport.engine.engine import Engine
from kvexport.errors import UsageError
from kvexport.evaluate.reference import Logs, Reference, Writer, log_softmax
from kvexport.evaluate.tasks import Sample

Rows = NDArray[np.float32]  # [counted, vocabulary]
BLOCK = 16  # rows that are judged at once: of a vocabulary of 50,000 they are 6 MB in float64


@dataclass(frozen=True)
class Outcome:
    """One sample. right: every counted token was the likeliest. nll: mean -ln p of the counted tokens, nats. kl:
    KL(full || engine) at every counted position, nats; agrees: whether the likeliest token there is the full cache's;
    both empty where there was nothing to compare with."""

    right: bool
    nll: float
    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]


def counted_rows(engine: Engine, samples: Sequence[Sample]) -> Iterator[tuple[int, int, Rows]]:
    """The logits at every sample's counted positions, all samples in one batch: prompts in chunks, then token by token,
    as given. Call by call, so that no more than a call's are in memory: the sample's number, the number of its first
    counted position, and the rows.

    Raises UsageError where a counted position lies inside a prompt and the artifact gives the logits of a call's last
    token alone, or merges nothing before the prompt's end.
    """
    lanes = engine.lanes(len(samples))
    counted = [np.array(sample.counted, dtype=np.int64) for sample in samples]
    done = [0] * len(samples)
    if engine.manifest.recipe.cache.merge_prompts == "end" and any(
        min(s.counted, default=s.prompt) < s.prompt - 1 for s in samples
    ):
        problem = "cache.merge_prompts is end, and the task counts tokens inside a prompt, where nothing has merged yet"
        raise UsageError(problem, "--tasks decoded, or another whose answers follow the prompt")

    def append(parts: list[NDArray[np.int64]], unread: list[int] | None) -> Iterator[tuple[int, int, Rows]]:
        prefill = unread is not None
        logits = lanes.append(parts, prefill=prefill, unread=unread or ())
        for lane, part in enumerate(parts):
            first, end = np.searchsorted(counted[lane], (done[lane], done[lane] + len(part)))
            offsets = counted[lane][first:end] - done[lane]
            if logits.shape[1] == 1 and (offsets != len(part) - 1).any():
                problem = f"{engine.path} gives the logits of a call's last token alone"
                raise UsageError(problem, "kvexport build --set export.logits=all")
            done[lane] += len(part)
            if len(offsets):
                yield lane, int(first), logits[lane, np.minimum(offsets, logits.shape[1] - 1)]

    ids = [np.array(sample.ids, dtype=np.int64) for sample in samples]
    chunk = lanes.prefill_chunk
    for start in range(0, max(sample.prompt for sample in samples), chunk):
        parts = [i[start : min(start + chunk, s.prompt)] for i, s in zip(ids, samples, strict=True)]
        yield from append(parts, [lane for lane, s in enumerate(samples) if s.prompt > start + chunk])
    # Nothing is asked after the last token.
    rest = [i[s.prompt : max(s.counted, default=-1) + 1] for i, s in zip(ids, samples, strict=True)]
    for step in range(max(map(len, rest))):
        yield from append([r[step : step + 1] for r in rest], None)


def counted_logits(engine: Engine, samples: Sequence[Sample]) -> list[Rows]:
    """All of `counted_rows`, [counted, vocabulary] of every sample."""
    rows: list[list[Rows]] = [[] for _ in samples]
    for lane, _, found in counted_rows(engine, samples):
        rows[lane].append(found)
    return [np.concatenate(found) for found in rows]


class Judge:
    """Compares a sample's logits with the truth, and where `against` is given with the full cache's log-probabilities:
    `against(first, count)` gives those of `count` counted positions from number `first` on. Rows may come in pieces,
    each once."""

    def __init__(self, sample: Sample, against: Callable[[int, int], Logs] | None) -> None:
        self._truth = np.array([sample.ids[p + 1] for p in sample.counted])
        self._against = against
        count = len(self._truth)
        self._nll, self._hits = np.zeros(count), np.zeros(count, bool)
        compared = 0 if against is None else count
        self._kl, self._agrees = np.zeros(compared), np.zeros(compared, bool)

    def take(self, first: int, logs: Logs) -> None:
        """Log-probabilities of counted positions from number `first` on."""
        rows = np.arange(first, first + len(logs))
        truth, best = self._truth[rows], logs.argmax(-1)
        self._nll[rows] = -logs[np.arange(len(rows)), truth]
        self._hits[rows] = best == truth
        if self._against is not None:
            reference = self._against(first, len(rows))
            # Rounding gives a divergence of about -1e-16 where both are the same.
            self._kl[rows] = np.maximum((np.exp(reference) * (reference - logs)).sum(-1), 0.0)
            self._agrees[rows] = best == reference.argmax(-1)

    def outcome(self) -> Outcome:
        """Of all rows."""
        return Outcome(bool(self._hits.all()), float(self._nll.mean()), self._kl, self._agrees)


def run_samples(
    engine: Engine,
    samples: Sequence[Sample],
    batch: int,
    *,
    reference: Reference | None = None,
    writer: Writer | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Outcome]:
    """Outcomes of all samples, `batch` at a time. reference: the full cache's predictions, to compare with. writer: of
    the reference, where these are they. advance: is told how many samples are done."""
    outcomes = []
    for start in range(0, len(samples), batch):
        part = samples[start : start + batch]
        judges = [
            Judge(sample, None if reference is None else partial(reference.logs, start + lane))
            for lane, sample in enumerate(part)
        ]
        for lane, first, rows in counted_rows(engine, part):
            for block in range(0, len(rows), BLOCK):
                logs = log_softmax(rows[block : block + BLOCK])
                judges[lane].take(first + block, logs)
                if writer is not None:
                    writer.put(start + lane, first + block, logs)
        outcomes += [judge.outcome() for judge in judges]
        advance(len(part))
    return outcomes


def step_seconds(engine: Engine, length: int, steps: int = 24) -> float:
    """Median seconds of one decode step of one sequence (its merging spread over the steps) after a prompt of `length`
    tokens."""
    lanes = engine.lanes(1)
    lanes.prefill([np.arange(length, dtype=np.int64) % engine.vocabulary])
    token = [np.array([1], dtype=np.int64)]
    spans = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            lanes.append(token)
        spans.append((time.perf_counter() - start) / steps)
    return float(np.median(spans))


@dataclass(frozen=True)
class Window:
    """A stretch of a very long sequence. end: tokens seen. nll: mean -ln p of what can be predicted, nats. key_norm:
    the largest norm of a cached key at its end. finite: whether every logit and the whole state were."""

    end: int
    nll: float
    key_norm: float
    finite: bool


def run_long(
    engine: Engine, ids: Sequence[int], counted: Sequence[int], window: int, decoded: int = 64
) -> list[Window]:
    """One sequence of any length, in chunks, its last tokens one by one: a `Window` for every `window` tokens, the loss
    over the counted positions (see `Sample`). Needs an artifact with the logits of every token."""
    lanes = engine.lanes(1)
    tokens = np.array(ids, dtype=np.int64)
    predicted = np.zeros(len(tokens), dtype=bool)
    predicted[list(counted)] = True
    windows: list[Window] = []
    losses: list[float] = []
    finite, start = True, 0
    while start < len(tokens) - 1:
        left = len(tokens) - decoded - start
        # A chunk ends where a window ends.
        size = min(lanes.prefill_chunk, left, window - start % window) if left > 0 else 1
        logits = lanes.append([tokens[start : start + size]], prefill=left > 0)[0]
        finite &= bool(np.isfinite(logits).all())
        rows = np.flatnonzero(predicted[start : start + size])
        losses += (-log_softmax(logits[rows])[np.arange(len(rows)), tokens[start + rows + 1]]).tolist()
        start += size
        if start % window == 0 or start >= len(tokens) - 1:
            norm, whole = _state_of(lanes.state.get_state())  # type: ignore[attr-defined]
            windows.append(Window(start, float(np.mean(losses)) if losses else float("nan"), norm, finite and whole))
            losses.clear()
    return windows


def _state_of(state: dict[str, NDArray[np.float32]]) -> tuple[float, bool]:
    """The largest norm of a used key, and whether every used slot is finite. Unused slots hold whatever they held."""
    largest, finite = 0.0, True
    for name, votes in state.items():
        if not name.endswith(".votes"):
            continue
        used = votes > 0
        rows = []
        for kind in (".key", ".value"):
            scale = state.get(name.replace(".votes", f"{kind}_scale"))  # of a small cache
            held = state[name.replace(".votes", kind)][used]
            rows.append(stored_rows(held, None if scale is None else scale[used]).astype(np.float64))
        keys, values = rows
        largest = max(largest, float(np.linalg.norm(keys, axis=-1).max(initial=0.0)))
        finite &= bool(np.isfinite(keys).all() and np.isfinite(values).all() and np.isfinite(votes).all())
    return largest, finite
