"""Speculative decoding: cost of its calls, accepted tokens, and tokens per second compared with no drafts.

    python speculation.py costs  [--contexts 8192,16384,32768] [--rounds 30] [--threads 2] [--bits 4]
    python speculation.py text   [--length 7900] [--new 128] [--kinds prose,code,chat] [--methods full,h2o] [--bits 4]
    python speculation.py text   --length 16000 --yarn 2 --bits 4 --greedy
    python speculation.py text   --length 32000 --yarn 4 --bits 4 --greedy --kinds prose,code --methods full
    python speculation.py text   --recipe tests/recipes/small-base.yaml --methods full --kinds code --length 1800
        --slots 256   # takes a minute
    python speculation.py given  [--contexts 16384,32768] [--new 128] [--threads 2] [--bits 4]
    python speculation.py periodic [--length 7900] [--new 256] [--kinds prose,code] [--methods h2o,keepkv]

`costs` measures the decoder of M (a random Llama of 28M parameters) alone, over state of random numbers: a step of the
full cache, its calls that verify, and a step of the drafter, all in turn. It also gives the speedup that follows from
the medians for given chances of acceptance.

`text` lets SmolLM2-135M-Instruct continue a text of `--length` tokens (Python's manual, its library's source), or
answer a question that asks for a quotation. The prompt is read once, and every side continues from its snapshot.

`given` measures M end to end with given chances of acceptance, since the chance with random weights means nothing. The
drafter runs, and its drafts are replaced by the answer without drafts, with mistakes at the given rate.

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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, head, interleave, make_checkpoint, save

import kvexport
from kvexport.engine.cache_drafter import CacheDrafter
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import Request
from kvexport.engine.speculation import draft_ngrams, drafter_of
from kvexport.evaluate.corpus import library_sources, manual
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.settings import longer_checkpoint
from kvexport.export.model.checkpoint import resolve_checkpoint
from kvexport.language.settings import GenerationSettings
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.state.periodic import new_periodic
from kvexport.state.snapshot import Snapshot

NAME = "speculation"
BUDGET, REBUILD, MOST = 512, 64, 8
ACCEPTED = (0.6, 0.7, 0.8, 0.9)
DELAY = 4  # steps between a selection in a thread and the first step that reads it
QUESTION = "Quote the first 25 lines of this text, word for word:\n\n"


def main() -> None:
    options = arguments()
    known = json.loads((RESULTS / f"{NAME}.json").read_text()) if (RESULTS / f"{NAME}.json").exists() else {}
    figures = {key: value for key, value in known.items() if key.split()[0] in WHAT}
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
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[16384])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["prose", "code", "chat"])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["full", "h2o"])
    parser.add_argument("--recipe", default="smollm2-135m-full", help="the recipe of text")
    parser.add_argument("--slots", type=int, default=BUDGET, help="slots of the drafter in text; also twice as many")
    parser.add_argument("--length", type=int, default=7900)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--greedy", action="store_true", help="text: no sampled answers")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="bits of weights; default: float32")
    parser.add_argument(
        "--yarn", type=float, default=1, help="text: the factor by which texts exceed the trained length"
    )
    parser.add_argument("--folder", default=None, help="the folder to build artifacts in; they are removed")
    return parser.parse_args()


def run_name(options: argparse.Namespace) -> str:
    """Return the name of a run among the figures."""
    name = options.what
    if options.what == "text":
        name += f" {options.recipe} {options.length}"
    return name + (f" int{options.bits}" if options.bits else "")


def m_engine(folder: Path, length: int, options: argparse.Namespace) -> Engine:
    """Return an engine of M with a full cache and a drafter's cache."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(make_checkpoint("M", folder / "M"))},
            "cache": {"method": "full"},
            "export": {"weights": "link"},
            "weights": {"bits": options.bits},
            "speculate": {"draft": "cache", "budget": BUDGET, "rebuild": REBUILD, "tokens": MOST, "after": 0},
            "limits": {"max_length": length, "max_batch": 1},
        }
    )
    return kvexport.load(kvexport.build(recipe, folder / f"artifact-{length}"), threads=options.threads, verify=False)


def costs(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Measure, by context, milliseconds of calls and the speedup that follows."""
    for context in options.contexts:
        engine = m_engine(folder, context + 64, options)
        assert isinstance(engine.drafter, CacheDrafter)
        full, own = engine.new_state(1), engine.drafter._selected.state
        fill(full, context, context)
        fill(own, BUDGET, context)
        sides: dict[str, Callable[[], float]] = {"drafter": partial(call, own, 1)}
        sides |= {f"{rows}": partial(call, full, rows) for rows in range(1, MOST + 2)}
        times = {name: float(np.median(x)) for name, x in interleave(sides, options.rounds).items()}
        step = times["1"]
        results[str(context)] = {
            "milliseconds": {name: round(1000 * seconds, 3) for name, seconds in times.items()},
            "steps": {name: round(seconds / step, 3) for name, seconds in times.items()},
            "speedup": {str(a): best(times, a) for a in ACCEPTED},
        }
        print(context, json.dumps(results[str(context)]), flush=True)


def fill(state: Any, used: int, length: int) -> None:
    """Fill a state with random entries."""
    rng = np.random.default_rng(0)
    heads = state._plan.caches[0].kv_heads
    for name, tensor in state.state.items():
        kind = name.rpartition(".")[2]
        array = tensor.reshape(len(tensor), heads, -1, *tensor.shape[2:])
        if kind in ("key", "value"):
            array[:, :, :used] = rng.standard_normal(array[:, :, :used].shape, dtype=np.float32)
        elif kind in ("votes", "position"):
            array[:, :, :used] = 1 if kind == "votes" else np.arange(length - used, length)
    state.past_length[:] = length


def call(state: Any, rows: int) -> float:
    start = time.perf_counter()
    state.decode(np.ones((1, rows), np.int64), np.array([[rows]]))
    seconds = time.perf_counter() - start
    state.rollback(0, rows)
    return seconds


def best(times: dict[str, float], accepted: float) -> dict[str, Any]:
    """Return the draft length that is fastest at a chance of acceptance, and its speedup over plain steps."""
    speed = {}
    for n in range(1, MOST + 1):
        tokens = (1 - accepted ** (n + 1)) / (1 - accepted)
        speed[n] = tokens * times["1"] / (n * times["drafter"] + times[f"{n + 1}"])
    n = max(speed, key=lambda n: speed[n])
    return {"tokens": n, "speedup": round(speed[n], 3)}


def text(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Measure acceptance and speed of every side, by method and kind of text."""
    for method in options.methods:
        changes = [f"cache.method={method}", "cache.budget=1.0", "speculate.draft=cache", "speculate.after=0"]
        changes += [f"weights.bits={options.bits or 'null'}", *stretched(options, folder)]
        loaded = load_recipe(options.recipe, changes)
        engine = kvexport.load(kvexport.build(loaded.recipe, folder / method), threads=options.threads, verify=False)
        for kind in options.kinds:
            start, last = read(engine, prompt(engine, kind, options.length))
            for sample in (False,) if options.greedy else (False, True):
                label = f"{method} {kind} {'drawn' if sample else 'greedy'}"
                settings = engine.settings(
                    max_new_tokens=options.new, do_sample=sample, top_k=0, temperature=1.0, seed=1, ignore_eos=True
                )
                answer, plain = answered(engine, start, last, settings, None)
                results[label] = {"plain": plain}
                for name, drafter in drafters(engine, options.slots).items():
                    tokens, figures = answered(engine, start, last, settings, drafter)
                    same = next((i for i, (a, b) in enumerate(zip(tokens, answer, strict=True)) if a != b), len(answer))
                    speedup = round(figures["tokens_per_second"] / plain["tokens_per_second"], 3)
                    results[label][name] = figures | {"speedup": speedup, "same_tokens": same}
                    print(label, name, json.dumps(results[label][name]), flush=True)


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
    """Measure cache.periodic by method and kind of text, slots, tokens between two selections, and delay.

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
                for every, delay in ((8, 0), (64, 0), (64, DELAY), (options.new, 0)):
                    if every + delay >= slots * 3 // 4:
                        continue
                    label = f"{method} {kind}, {slots} slots, every {every}, delay {delay}"
                    settings = {"slots": slots, "every": every, "delay": delay}
                    results[label] = periods(engine, over, start, continuation, full, settings)
                    print(label, json.dumps(results[label]), flush=True)
                    options.save()


def periods(
    engine: Engine, over: Any, start: Snapshot, continuation: list[int], full: Any, settings: dict[str, int]
) -> dict[str, Any]:
    """Return the figures of tokens after a snapshot with cache.periodic.

    KL is to the rows of the full cache, in nats. The milliseconds of a selection are medians of three parts: `choose`
    ranks by scores, `prepare` selects and copies in the thread, and `place` copies into the selected cache.
    """
    recipe = engine.manifest.recipe
    section = recipe.cache.periodic.model_copy(update=settings)
    cache = recipe.cache.model_copy(update={"periodic": section})
    manifest = dataclasses.replace(engine.manifest, recipe=recipe.model_copy(update={"cache": cache}))
    state, spent = new_periodic(manifest, engine.model, 1), dict[str, list[float]]()
    for name in ("_choose", "_prepare", "_place"):
        setattr(state, name, timed(getattr(state, name), spent.setdefault(name[1:], [])))
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
    """Return the function, with the seconds of its calls recorded."""

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


def given(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Measure the speed of every side by context, all in turn."""
    for context in options.contexts:
        engine = m_engine(folder, context + 2 * options.new, options)
        ids = np.random.default_rng(0).integers(0, engine.vocabulary, context).tolist()
        start, last = read(engine, ids)
        settings = engine.settings(max_new_tokens=options.new, do_sample=False, ignore_eos=True)
        answer, _ = answered(engine, start, last, settings, None)
        sides: dict[str, Any] = {"plain": None}
        for rate, tokens in ((0.7, 2), (0.8, 2), (0.8, 3), (0.9, 3), (0.9, 4)):
            drafter = changed_drafter(engine, tokens=tokens)
            sides[f"{tokens} tokens, {rate} accepted"] = Mistaken(drafter, answer, rate, engine.vocabulary)
        runs: dict[str, list[Any]] = {name: [] for name in sides}
        for _ in range(max(1, options.rounds // 10)):
            for name, drafter in sides.items():
                tokens, figures = answered(engine, start, last, settings, drafter)
                assert tokens == answer, name
                runs[name].append(figures)
        speed = {name: float(np.median([x["tokens_per_second"] for x in each])) for name, each in runs.items()}
        results[str(context)] = {
            name: each[0] | {"tokens_per_second": speed[name], "speedup": round(speed[name] / speed["plain"], 3)}
            for name, each in runs.items()
        }
        print(context, json.dumps(results[str(context)], indent=1), flush=True)


class Mistaken:
    """A drafter that does its work but returns the answer with mistakes; each token is right at `rate`."""

    def __init__(self, drafter: Any, answer: list[int], rate: float, vocabulary: int) -> None:
        self.drafter, self.answer, self.rate, self.vocabulary = drafter, answer, rate, vocabulary
        self.rng = np.random.default_rng(0)

    def __call__(self, requests: Sequence[Request], lanes: Lanes) -> list[list[int]]:
        """Return the drafted tokens of each request, as `kvexport.engine.speculation.Drafter` requires."""
        (draft,), done = self.drafter(requests, lanes), len(requests[0].tokens)
        right = self.answer[done : done + len(draft)]
        return [[token if self.rng.random() < self.rate else (token + 1) % self.vocabulary for token in right]]


def drafters(engine: Engine, slots: int) -> dict[str, Any]:
    """Return drafters by name: n-grams, and the cache with several numbers of tokens, budgets and intervals."""
    sides: dict[str, Any] = {"ngram 4": partial(draft_ngrams, tokens=4, max_length=engine.max_length)}
    for tokens, budget, rebuild in (
        (2, slots, 64), (3, slots, 64), (4, slots, 64), (3, slots, 8), (3, slots, 256), (3, 2 * slots, 64),
    ):  # fmt: skip
        name = f"cache {tokens}, {budget} slots, rebuilt every {rebuild}"
        sides[name] = changed_drafter(engine, tokens=tokens, budget=budget, rebuild=rebuild)
    return sides


def changed_drafter(engine: Engine, **changes: int) -> Any:
    """Return the cache drafter with other settings than the recipe's."""
    recipe = engine.manifest.recipe
    speculate = recipe.speculate.model_copy(update=changes)
    manifest = dataclasses.replace(engine.manifest, recipe=recipe.model_copy(update={"speculate": speculate}))
    return drafter_of(manifest, engine.model)


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


WHAT = {"costs": costs, "text": text, "given": given, "periodic": periodic}

if __name__ == "__main__":
    main()
