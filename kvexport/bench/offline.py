"""Measurements of an artifact in the calling process: times of decode steps and of prefill, for several sizes.

Prompts are random tokens; answers are greedy and of a fixed length. A decode step is one call of `Engine.step`:
scheduling, the model, a merge of KV caches if one is due, and sampling. A prompt is read chunk by chunk with merges
after chunks, as in the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import DECODING, Bundle, Request
from kvexport.errors import UsageError
from kvexport.report import KeyValues, Section, Table

Show = Callable[[str], AbstractContextManager[Any]]  # shows a line of text while the returned context is open
WARM_UP = 2  # first decode steps, which are not timed
PERCENTILES = (50, 90, 99)
COLUMNS = [*(f"p{p} ms" for p in PERCENTILES), "mean ms", "max ms"]


@dataclass(frozen=True)
class Plan:
    batches: tuple[int, ...] = (1,)  # numbers of sequences that decode together
    contexts: tuple[int, ...] = (512,)  # numbers of prompt tokens
    steps: int = 64  # number of decode steps that are timed
    rounds: int = 3  # how often each prompt is read


@dataclass
class Result:
    """The benchmark figures of an artifact, one row for each batch or context, in milliseconds."""

    artifact: str
    method: str
    plan: Plan
    cache_bytes: int  # bytes of the KV cache of one sequence
    decode: list[dict[str, Any]] = field(default_factory=list)
    prefill: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(engine: Engine, name: str, plan: Plan, show: Show | None = None) -> Result:
    """Measure decode steps and prefill of an engine in which no request runs."""
    _check(engine, plan)
    result = Result(name, engine.manifest.recipe.cache.method, plan, engine.plan.bytes(1))
    random = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(i) for i in random.integers(0, engine.vocabulary, length)]

    for context in _shown(plan.contexts, "prompts", show):
        _prefill(engine, prompt(min(context, 2 * engine.manifest.limits.prefill_chunk)))  # to warm up
        seconds = [_prefill(engine, prompt(context)) for _ in range(plan.rounds)]
        rate = round(context / float(np.median(seconds)), 1)
        result.prefill.append({"context": context, "tokens_per_second": rate, "ttft": percentiles(seconds)})
    for context in _shown(plan.contexts, "decoding", show):
        for batch in plan.batches:
            seconds, tokens = _decode(engine, [prompt(context) for _ in range(batch)], plan.steps)
            rate = round(tokens / sum(seconds), 1)
            result.decode.append(
                {"context": context, "batch": batch, "tokens_per_second": rate, "step": percentiles(seconds)}
            )
    return result


def _check(engine: Engine, plan: Plan) -> None:
    most = max(plan.contexts) + plan.steps + WARM_UP
    if most > engine.max_length:
        raise UsageError(
            f"a context of {max(plan.contexts)} with {plan.steps} steps is {most} tokens, and the artifact takes "
            f"{engine.max_length}",
            f"--context {max(engine.max_length - plan.steps - WARM_UP, 1)}, or build with a larger limits.max_length",
        )
    if max(plan.batches) > engine.max_batch:
        raise UsageError(
            f"a batch of {max(plan.batches)}, and the artifact takes {engine.max_batch}",
            f"--batch {engine.max_batch}, or build with --set limits.max_batch={max(plan.batches)}",
        )


def _shown(contexts: Sequence[int], what: str, show: Show | None) -> Iterator[int]:
    for context in contexts:
        if show is None:
            yield context
        else:
            with show(f"{what} at {context}"):
                yield context


def _prefill(engine: Engine, prompt: list[int]) -> float:
    limits, prompts = engine.manifest.limits, engine.manifest.recipe.cache.merge_prompts
    chunk, every = limits.prefill_chunk, limits.merge_every
    lanes = Lanes(engine.new_state(1), engine.plan, 1, prefill_chunk=chunk, merge_every=every, merge_prompts=prompts)
    start = time.perf_counter()
    lanes.prefill([np.array(prompt, np.int64)])
    return time.perf_counter() - start


def _decode(engine: Engine, prompts: Sequence[Sequence[int]], steps: int) -> tuple[list[float], int]:
    """Return the seconds of each step in which all sequences decode, and the number of tokens of these steps.

    A step gives one token per sequence, and more if drafted tokens are accepted.
    """
    settings = engine.settings(max_new_tokens=steps + WARM_UP + 1, do_sample=False, ignore_eos=True)
    bundle = Bundle()  # requests of one bundle decode only after all of their prompts were read
    requests = [Request(prompt, settings, bundle, i) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    seconds: list[float] = []
    tokens: list[int] = []
    while engine.busy:
        counts = all(request.state is DECODING for request in requests)
        before, start = bundle.timing.generated_tokens, time.perf_counter()
        engine.step()
        if counts:
            seconds.append(time.perf_counter() - start)
            tokens.append(bundle.timing.generated_tokens - before)
    if failed := [request.error for request in requests if request.error is not None]:
        raise failed[0]
    return seconds[WARM_UP:], sum(tokens[WARM_UP:])


def sections(result: Result) -> list[Section]:
    facts: dict[str, str | int] = {
        "artifact": result.artifact,
        "method": result.method,
        "cache of one sequence, bytes": result.cache_bytes,
    }
    decode = [[r["context"], r["batch"], r["tokens_per_second"], *cells(r["step"])] for r in result.decode]
    prefill = [[r["context"], r["tokens_per_second"], *cells(r["ttft"])] for r in result.prefill]
    return [
        KeyValues("What was measured", facts),
        Table("Decoding: a step of the batch", ["context", "batch", "tokens/s", *COLUMNS], decode),
        Table("Prompts: until the first token", ["context", "tokens/s", *COLUMNS], prefill),
    ]


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not len(values):
        return {**{f"p{p}": None for p in PERCENTILES}, "mean": None, "max": None}
    percentiles = np.percentile(values, PERCENTILES)
    named: dict[str, float | None] = {f"p{p}": _ms(v) for p, v in zip(PERCENTILES, percentiles, strict=True)}
    return {**named, "mean": _ms(np.mean(values)), "max": _ms(np.max(values))}


def cells(figures: dict[str, Any]) -> list[float | None]:
    return [figures[f"p{p}"] for p in PERCENTILES] + [figures["mean"], figures["max"]]


def _ms(seconds: Any) -> float:
    return round(float(seconds) * 1e3, 3)
