"""Decoding with drafts from n-grams, and over selected entries of a full cache: tokens per second, and the loss.

    python benchmarks/speed/speculation.py text [--length 7900] [--new 128] [--kinds prose,code,chat] [--bits 4]
    python benchmarks/speed/speculation.py text --length 16000 --yarn 2 --bits 4 --greedy
    python benchmarks/speed/speculation.py text --length 32000 --yarn 4 --bits 4 --greedy --kinds prose,code
    python benchmarks/speed/speculation.py periodic [--length 7900] [--new 256] [--methods h2o,keepkv]

`text` lets SmolLM2-135M-Instruct continue a text of `--length` tokens (Python's manual, its library's source), or
answer a question that asks for a quotation. The prompt is read once, and both sides continue from its snapshot.

`periodic` lets SmolLM2 continue a text with cache.periodic, each token given. KL is to the full cache, in nats. With as
many tokens between two selections as --new there is a single selection, which shows the selected cache alone.

Every row is saved as soon as it is measured. --bits rounds weights, as is usual on a CPU. --yarn stretches the rotary
embedding of a model by a factor (arXiv 2309.00071), so that it reads more than the 8,192 tokens that SmolLM2 was
trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvexport
from benchmarks.common import earlier, head, save
from benchmarks.quality.stability import longer_checkpoint
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import Request
from kvexport.evaluate.corpus import library_sources, manual
from kvexport.evaluate.reference import log_softmax
from kvexport.export.model.checkpoint import resolve_checkpoint
from kvexport.language.settings import GenerationSettings
from kvexport.recipe.load import load_recipe
from kvexport.state.periodic import new_periodic
from kvexport.state.snapshot import Snapshot

NAME = "speculation"
BUDGET = 512
QUESTION = "Quote the first 25 lines of this text, word for word:\n\n"


def main() -> None:
    options = arguments()
    figures = {key: value for key, value in earlier(NAME).items() if key.split()[0] in WHAT}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results: dict[str, Any] = {}
        figures[run_name(options)] = {**head(), "figures": results}
        options.save = partial(save, NAME, figures)
        try:
            WHAT[options.what](options, Path(folder), results)
        finally:  # also the figures of an interrupted run
            save(NAME, figures)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=sorted(WHAT))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["prose", "code", "chat"])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["h2o"])
    parser.add_argument("--recipe", default="smollm2-135m-full", help="the recipe of text")
    parser.add_argument("--slots", type=int, default=BUDGET, help="slots of the selected cache; also twice as many")
    parser.add_argument("--length", type=int, default=7900)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--greedy", action="store_true", help="text: no sampled answers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="bits of weights; default: float32")
    parser.add_argument(
        "--yarn", type=float, default=1, help="text: the factor by which texts exceed the trained length"
    )
    parser.add_argument("--folder", default=None, help="the folder to build artifacts in; they are removed")
    return parser.parse_args()


def run_name(options: argparse.Namespace) -> str:
    name = options.what
    if options.what == "text":
        name += f" {options.recipe} {options.length}"
    return name + (f" int{options.bits}" if options.bits else "")


def text(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Measure acceptance and speed of drafts by kind of text."""
    changes = ["speculate.draft=ngram", f"weights.bits={options.bits or 'null'}", *stretched(options, folder)]
    loaded = load_recipe(options.recipe, changes)
    engine = kvexport.load(kvexport.build(loaded.recipe, folder / "artifact"), threads=options.threads, verify=False)
    drafter = engine.drafter
    for kind in options.kinds:
        start, last = read(engine, prompt(engine, kind, options.length))
        for sample in (False,) if options.greedy else (False, True):
            label = f"{kind} {'drawn' if sample else 'greedy'}"
            settings = engine.settings(
                max_new_tokens=options.new, do_sample=sample, top_k=0, temperature=1.0, seed=1, ignore_eos=True
            )
            answer, plain = answered(engine, start, last, settings, None)
            tokens, figures = answered(engine, start, last, settings, drafter)
            same = next((i for i, (a, b) in enumerate(zip(tokens, answer, strict=True)) if a != b), len(answer))
            speedup = round(figures["tokens_per_second"] / plain["tokens_per_second"], 3)
            results[label] = {"plain": plain, "ngram 4": figures | {"speedup": speedup, "same_tokens": same}}
            print(label, json.dumps(results[label]), flush=True)
            options.save()


def stretched(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return changes of the recipe for texts longer than the model's trained length."""
    if options.yarn == 1:
        return []
    base = resolve_checkpoint(load_recipe(options.recipe).recipe.model.path, None)
    trained = json.loads((base / "config.json").read_text())["max_position_embeddings"]
    longer = longer_checkpoint(base, folder / "longer", int(options.yarn * trained))
    config = json.loads((longer / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": options.yarn,
        "original_max_position_embeddings": trained,
    }
    (longer / "config.json").write_text(json.dumps(config))
    return [f"model.path={longer}", f"limits.max_length={int(options.yarn * trained)}", "limits.max_batch=1"]


def prompt(engine: Engine, kind: str, length: int) -> list[int]:
    assert engine.tokenizer is not None
    prose = manual()[120_000:]
    source = "\n".join(library_sources(True).values())[40_000:] if kind == "code" else prose
    ids: list[int] = engine.tokenizer.encode(source[: 12 * length])[:length]
    if kind != "chat":
        return ids
    shown = QUESTION + engine.tokenizer.decode(ids[: length - 200])
    return [int(i) for i in engine.encode_chat([{"role": "user", "content": shown}])]


def periodic(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Measure cache.periodic by method and kind of text, slots, and tokens between two selections.

    The figures are the tokens per second of the full cache, and for each setting the KL to it, tokens per second, and
    the time of a selection.
    """
    for method in options.methods:
        changes = [f"cache.method={method}", "cache.budget=1.0", f"cache.periodic.slots={2 * options.slots}"]
        loaded = load_recipe(options.recipe, [*changes, f"limits.max_length={options.length + 8}"])
        engine = kvexport.load(kvexport.build(loaded.recipe, folder / method), threads=options.threads, verify=False)
        for kind in options.kinds:
            ids = prompt(engine, kind, options.length)
            start, last = read(engine, ids[: -options.new])
            continuation = [last, *ids[-options.new : -1]]
            limits = engine.manifest.limits
            over = partial(Lanes, plan=engine.plan, lanes=1, prefill_chunk=limits.prefill_chunk, merge_every=1)
            full, speed = given_rows(over(engine.new_state(1)), start, continuation)
            results[f"{method} {kind}, full cache"] = {"tokens_per_second": speed}
            for slots in (options.slots, 2 * options.slots):
                for every in (8, 64, options.new):
                    if every >= slots * 3 // 4:
                        continue
                    label = f"{method} {kind}, {slots} slots, every {every}"
                    settings = {"slots": slots, "every": every}
                    results[label] = periods(engine, over, start, continuation, full, settings)
                    print(label, json.dumps(results[label]), flush=True)
                    options.save()


def periods(
    engine: Engine, over: Any, start: Snapshot, continuation: list[int], full: Any, settings: dict[str, int]
) -> dict[str, Any]:
    """Return the figures of tokens after a snapshot with cache.periodic.

    KL is to the rows of the full cache, in nats. The milliseconds of a copy into the selected cache are a median.
    """
    recipe = engine.manifest.recipe
    section = recipe.cache.periodic.model_copy(update=settings)
    cache = recipe.cache.model_copy(update={"periodic": section})
    manifest = dataclasses.replace(engine.manifest, recipe=recipe.model_copy(update={"cache": cache}))
    state, spent = new_periodic(manifest, engine.model, 1), dict[str, list[float]]()
    state._place = timed(state._place, spent.setdefault("place", []))  # type: ignore[method-assign]
    small, speed = given_rows(over(state), start, continuation)
    full, small = log_softmax(full), log_softmax(small)
    divergence = np.sum(np.exp(full) * (full - small), axis=-1)
    return {
        "kl": round(float(divergence.mean()), 5),
        "tokens_per_second": speed,
        "milliseconds": {name: round(1000 * float(np.median(each)), 2) for name, each in spent.items() if each},
        "choices": len(spent["place"]),
    }


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:

    def call(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


def given_rows(lanes: Lanes, start: Snapshot, continuation: list[int]) -> tuple[Any, float]:
    """Return the logits after each of the given tokens that follow a snapshot, and tokens per second."""
    lanes.restore(0, start.saved)
    rows, begin = [], time.perf_counter()
    for token in continuation:
        rows.append(lanes.append([[token]])[0, 0].copy())
    return np.stack(rows), round(len(continuation) / (time.perf_counter() - begin), 2)


def answered(
    engine: Engine, start: Snapshot, last: int, settings: GenerationSettings, drafter: Any
) -> tuple[list[int], dict[str, Any]]:
    """Return the answer to a prompt of which all tokens but the last are read, and its figures."""
    engine.drafter = drafter
    request = Request([last], settings, start=start)
    engine.add(request)
    while engine.busy:
        engine.step()
    if request.error is not None:
        raise request.error
    timing = request.timing
    return [token.id for token in request.tokens], {
        "tokens_per_second": round(timing.decoded_tokens / timing.decode_seconds, 2),
        "tokens_per_step": round(timing.decoded_tokens / timing.steps, 3),
        "accepted": round(timing.accepted_tokens / timing.drafted_tokens, 3) if timing.drafted_tokens else None,
    }


def read(engine: Engine, ids: list[int]) -> tuple[Snapshot, int]:
    """Return the state after all tokens of a prompt but the last, and that token."""
    engine.drafter = None
    request = Request(ids[:-1], engine.settings(max_new_tokens=1, do_sample=False), keep=True)
    engine.add(request)
    while engine.busy:
        engine.step()
    snapshot = request.snapshot
    assert snapshot is not None
    return dataclasses.replace(snapshot, ids=snapshot.ids[: len(ids) - 1], sampler=None, text=None), ids[-1]


WHAT = {"text": text, "periodic": periodic}

if __name__ == "__main__":
    main()
