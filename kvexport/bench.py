"""Measure an artifact (an exported model) in this process: times of decode steps and prompts, for several sizes.

Prompts are random tokens; answers are greedy and of a fixed length. A decode step is one call of `Engine.step`:
scheduling, the model, a merge of KV caches if one is due, and sampling. A prompt is read chunk by chunk with merges
after chunks, as in the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvexport.engine.engine import Engine
from kvexport.engine.request import DECODING, Bundle, Request
from kvexport.errors import UsageError
from kvexport.report import KeyValues, Section, Table
from kvexport.terminal import silent

Show = Callable[[str, "int | None"], AbstractContextManager[Any]]
WARM_UP = 2  # first decode steps, which are not timed
PERCENTILES = (50, 90, 99)


def measure(
    engine: Engine,
    name: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int = 64,
    rounds: int = 3,
    show: Show = silent,
) -> dict[str, Any]:
    """Measure an idle engine: return the times of its decode steps and of reading prompts, in milliseconds.

    A prompt of each length in `contexts` (tokens) is read `rounds` times. After a prompt, `steps` decode steps run for
    each number of sequences in `batches`.
    """
    _check(engine, batches, contexts, steps)
    random = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(i) for i in random.integers(0, engine.vocabulary, length)]

    prefill, decode = [], []
    for context in contexts:
        with show(f"prompts at {context}", None):
            _prefill(engine, prompt(min(context, 2 * engine.manifest.limits.prefill_chunk)))  # to warm up
            seconds = [_prefill(engine, prompt(context)) for _ in range(rounds)]
        rate = round(context / float(np.median(seconds)), 1)
        prefill.append({"context": context, "tokens_per_second": rate, "ttft": percentiles(seconds)})
    for context in contexts:
        with show(f"decoding at {context}", None):
            for batch in batches:
                seconds, tokens = _decode(engine, [prompt(context) for _ in range(batch)], steps)
                row = {"context": context, "batch": batch, "tokens_per_second": round(tokens / sum(seconds), 1)}
                decode.append({**row, "step": percentiles(seconds)})
    method = engine.manifest.recipe.cache.method
    about = {"artifact": name, "method": method, "cache_bytes": engine.plan.bytes(1), "steps": steps, "rounds": rounds}
    return {**about, "decode": decode, "prefill": prefill}


def _check(engine: Engine, batches: Sequence[int], contexts: Sequence[int], steps: int) -> None:
    most = max(contexts) + steps + WARM_UP
    if most > engine.max_length:
        raise UsageError(
            f"a context of {max(contexts)} with {steps} steps is {most} tokens, and the artifact takes "
            f"{engine.max_length}",
            f"--context {max(engine.max_length - steps - WARM_UP, 1)}, or build with a larger limits.max_length",
        )
    if max(batches) > engine.max_batch:
        raise UsageError(
            f"a batch of {max(batches)}, and the artifact takes {engine.max_batch}",
            f"--batch {engine.max_batch}, or build with --set limits.max_batch={max(batches)}",
        )


def _prefill(engine: Engine, prompt: list[int]) -> float:
    lanes = engine.lanes(1)
    start = time.perf_counter()
    lanes.prefill([np.array(prompt, np.int64)])
    return time.perf_counter() - start


def _decode(engine: Engine, prompts: Sequence[Sequence[int]], steps: int) -> tuple[list[float], int]:
    """Generate `steps` tokens after each prompt; return the seconds of each decode step, and the tokens generated.

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


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = {f"p{p}": float(np.percentile(seconds, p)) for p in PERCENTILES}
    values |= {"mean": float(np.mean(seconds)), "max": max(seconds)}
    return {name: round(value * 1e3, 3) for name, value in values.items()}


def sections(result: dict[str, Any]) -> list[Section]:
    facts = {"artifact": result["artifact"], "method": result["method"]}
    decode = [[r["context"], r["batch"], r["tokens_per_second"], *r["step"].values()] for r in result["decode"]]
    prefill = [[r["context"], r["tokens_per_second"], *r["ttft"].values()] for r in result["prefill"]]
    times = [*(f"p{p} ms" for p in PERCENTILES), "mean ms", "max ms"]
    return [
        KeyValues("What was measured", {**facts, "cache of one sequence, bytes": result["cache_bytes"]}),
        Table("Decoding: a step of the batch", ["context", "batch", "tokens/s", *times], decode),
        Table("Prompts: until the first token", ["context", "tokens/s", *times], prefill),
    ]
