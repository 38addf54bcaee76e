"""Samples through an engine: what it predicts where an answer stands, against the truth and against the full cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.evaluate.tasks import Sample
from kvexport.runtime.engine import Engine

Rows = NDArray[np.float32]  # [counted, vocabulary]


@dataclass(frozen=True)
class Outcome:
    """One sample. right: every counted token was the likeliest. nll: mean -ln p of the counted tokens, nats. kl:
    KL(full || engine) at every counted position, nats; agrees: whether the likeliest token there is the full
    cache's."""

    right: bool
    nll: float
    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]


def counted_logits(engine: Engine, samples: Sequence[Sample]) -> list[Rows]:
    """The logits at every sample's counted positions, all samples in one batch: prompts in chunks, then token by token,
    as given.

    Raises UsageError where a counted position lies inside a prompt and the artifact gives the logits of a call's last
    token alone.
    """
    rows: list[list[Rows]] = [[] for _ in samples]
    lanes = engine.lanes(len(samples))
    wanted = [set(sample.counted) for sample in samples]
    done = [0] * len(samples)

    def append(parts: list[NDArray[np.int64]], prefill: bool) -> None:
        logits = lanes.append(parts, prefill=prefill)
        for lane, part in enumerate(parts):
            for offset in range(len(part)):
                if done[lane] + offset in wanted[lane]:
                    if logits.shape[1] == 1 and offset != len(part) - 1:
                        problem = f"{engine.path} gives the logits of a call's last token alone"
                        raise UsageError(problem, "kvexport build --set export.logits=all")
                    rows[lane].append(logits[lane, min(offset, logits.shape[1] - 1)].copy())
            done[lane] += len(part)

    ids = [np.array(sample.ids, dtype=np.int64) for sample in samples]
    for start in range(0, max(sample.prompt for sample in samples), lanes.prefill_chunk):
        append([i[start : min(start + lanes.prefill_chunk, s.prompt)] for i, s in zip(ids, samples, strict=True)], True)
    # Nothing is asked after the last token.
    rest = [i[s.prompt : max(s.counted, default=-1) + 1] for i, s in zip(ids, samples, strict=True)]
    for step in range(max(map(len, rest))):
        append([r[step : step + 1] for r in rest], False)
    return [np.array(found, dtype=np.float32) for found in rows]


def log_softmax(logits: Rows) -> NDArray[np.float64]:
    """Along the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def judge(sample: Sample, logits: Rows, full: Rows | None) -> Outcome:
    """Compare logits [counted, vocabulary] with the truth and the full cache's logits (None: these are they)."""
    truth = np.array([sample.ids[p + 1] for p in sample.counted])
    found = log_softmax(logits)
    best = logits.argmax(-1)
    nll = float(-found[np.arange(len(truth)), truth].mean())
    if full is None:
        nothing = np.zeros(len(truth))
        return Outcome(bool((best == truth).all()), nll, nothing, nothing == 0)
    reference = log_softmax(full)
    # Rounding gives a divergence of about -1e-16 where both are the same.
    kl = np.maximum((np.exp(reference) * (reference - found)).sum(-1), 0.0)
    return Outcome(bool((best == truth).all()), nll, kl, best == full.argmax(-1))


def run_samples(
    engine: Engine, samples: Sequence[Sample], batch: int, full: Sequence[Rows] | None
) -> tuple[list[Outcome], list[Rows]]:
    """Outcomes of all samples, `batch` at a time, and their logits. full: the full cache's logits, sample by sample."""
    logits: list[Rows] = []
    for start in range(0, len(samples), batch):
        logits += counted_logits(engine, samples[start : start + batch])
    references = full if full is not None else [None] * len(samples)
    return [judge(s, x, f) for s, x, f in zip(samples, logits, references, strict=True)], logits


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
            norm, whole = _state_of(lanes.backend.get_state())  # type: ignore[attr-defined]
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
        keys = state[name.replace(".votes", ".key")][used].astype(np.float64)
        values = state[name.replace(".votes", ".value")][used]
        largest = max(largest, float(np.linalg.norm(keys, axis=-1).max(initial=0.0)))
        finite &= bool(np.isfinite(keys).all() and np.isfinite(values).all() and np.isfinite(votes).all())
    return largest, finite
