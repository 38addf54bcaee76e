"""Contexts that are compressed once at their end to 1/10 and 1/50: KL and answers of SmolLM2 after that.

    python benchmarks/quality/once.py --work DIR [--methods h2o,ballot+listed,...] [--parts 10,50] [--texts 4]
        [--tasks text,codes] [--threads 1]

The task `text` is the KL to the full cache over the 256 tokens that follow 2,000 of Python's manual. The task `codes`
has the passages of `recall_real.py` with 2,000 tokens, whose six questions are asked of copies of the cache. Every
engine is built as a user would build it, with `cache.merge_prompts: end`. All methods of a part have the same number of
slots. Reference queries are not counted, since a compressed cache does not need them. No merge happens after the
context. Results are added to benchmarks/results/once.json text by text. Results that the file already holds are not
measured again.

A method is NAME, NAME:queries=192 (a parameter), or either with +listed (measured budgets of layers), +heads (of heads)
or +18 (a whole layer). `fitted` is the method of the recipe smollm2-135m-once.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvexport
from benchmarks.common import TEST_RECIPES, earlier, options_of, save
from benchmarks.quality import recall
from benchmarks.quality.recall_real import passages
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Text
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.settings import overrides_of
from kvexport.evaluate.statistics import mean
from kvexport.files import json_digest
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.load import load_recipe
from kvexport.state.lane import Counters, Saved

NAME = "once"
LENGTH, FOLLOWING, CHUNK, QUESTIONS = 2000, 256, 256, 6
METHODS = (
    "streaming",
    "h2o",
    "snapkv",
    "keepkv",
    "grkv",
    "attention_matching",
    "ballot",
    "ballot+listed",
    "fitted",
    "fitted+listed",
    "ballot+heads",
    "fitted+heads",
)
SHARES = {"listed": str(TEST_RECIPES / "smollm2-135m-listed.yaml"), "heads": "smollm2-135m-heads"}
# Methods with a fit have the queries of the last 32 tokens, of three query heads each.
SETTINGS = {
    "grkv": "grkv:queries=96",
    "attention_matching": "attention_matching:queries=96",
    "fitted": "attention_matching:after=ballot:queries=96:change_max=10:bias_max=6",
}


def engine_of(work: Path, method: str, divisor: int, threads: int) -> kvexport.Engine:
    """Return an engine; an artifact that the folder already holds is not built again."""
    named, *more = method.split("+")
    settings = [
        *overrides_of(SETTINGS.get(named, named)),
        f"cache.budget={LENGTH // divisor if divisor > 1 else LENGTH + 2 * CHUNK}",
        "cache.merge_prompts=end",
        f"cache.merge_every={2 * CHUNK}",
        f"cache.allocation.whole={[int(layer) for layer in more if layer not in SHARES]}",
        f"limits.max_length={LENGTH + 2 * CHUNK}",
        f"limits.max_batch={QUESTIONS}",
        f"export.prefill_chunk={CHUNK}",
        "export.logits=all",
    ]
    for recipe in [SHARES[x] for x in more if x in SHARES]:
        shares = load_recipe(recipe, []).recipe.cache.allocation.shares
        settings += ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"]
    where = work / json_digest(settings)[:16]
    if not where.exists():
        kvexport.build(load_recipe("smollm2-135m-base", settings).recipe, where)
    return kvexport.load(where, threads=threads, verify=False)


def read(engine: kvexport.Engine, ids: list[int]) -> Saved:
    """Return the state of a lane that has read a context, before it merges.

    If a method observes the last queries of each call, only the last queries of the context count.
    """
    lanes, context = engine.lanes(1), np.array(ids, np.int64)
    starts = [*range(0, len(ids) - recall.TAIL, CHUNK), len(ids) - recall.TAIL]
    for start, end in itertools.pairwise([*starts, len(ids)]):
        if start == starts[-1] and any(s.window for s in engine.manifest.recipe.cache.build_method().statistics):
            lanes.write(0, {name: x * 0 for name, x in lanes.read(0).items() if name.endswith(".score")})
        lanes.append([context[start:end]], prefill=True, unread=[0])
    assert lanes.merges == 0
    return Saved(lanes.read(0), lanes.counters(0))


def compressed(engine: kvexport.Engine, saved: Saved) -> Saved:
    """Return the lane's state after the merge at the prompt's end."""
    lanes, layers = engine.lanes(1), engine.plan.caches
    if not any(layer.merges for layer in layers):
        return saved
    lanes.restore(0, saved)
    lanes.state.merge(0, 1)
    held = tuple(min(budget, saved.counters.length) for layer in layers for budget in layer.budget)
    return Saved(lanes.read(0), Counters(held, 0, saved.counters.length))


def following(engine: kvexport.Engine, saved: Saved, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the log-probabilities [tokens, vocabulary] of the tokens after the context."""
    lanes = engine.lanes(1)
    lanes.restore(0, saved)
    logits = lanes.append([ids], prefill=True)[0]
    assert lanes.merges == 0
    return log_softmax(logits)


def asked(engine: kvexport.Engine, saved: Saved, passage: recall.Passage) -> list[list[float]]:
    """Return [exact, digits, nll] of every question."""
    lanes = engine.lanes(len(passage.questions))
    for lane in range(lanes.count):
        lanes.restore(lane, saved)
    answers = recall.continued(lanes, passage.questions)
    assert lanes.merges == 0
    return [[int(a.exact), round(a.digits, 4), round(a.nll, 4)] for a in answers]


def text_of(tokenizer: Tokenizer, number: int) -> list[int]:
    """Return a context from Python's manual with the tokens that follow it."""
    return Text(tokenizer, manual()).text(np.random.default_rng([1000, number]), LENGTH + FOLLOWING)[0]


class Measure:
    """One text, or one passage with its questions. It is read once for all methods with the same statistics."""

    def __init__(self, task: str, number: int, full: kvexport.Engine) -> None:
        assert full.tokenizer is not None and not any(layer.merges for layer in full.plan.caches)
        self.task, self._read = task, dict[str, Saved]()
        if task == "codes":
            self._passage = passages(full, task, number + 1, LENGTH)[number]
            self._context = self._passage.ids
            return
        ids = text_of(full.tokenizer, number)
        self._context, self._following = ids[:LENGTH], np.array(ids[LENGTH:], np.int64)
        self._right = following(full, self._saved(full), self._following)

    def _saved(self, engine: kvexport.Engine) -> Saved:
        method = engine.manifest.recipe.cache.build_method()
        kept = str((method.statistics, method.extra_state, method.vote_exponent, len(engine.plan.caches)))
        if kept not in self._read:
            self._read[kept] = read(engine, self._context)
        return self._read[kept]

    def of(self, engine: kvexport.Engine) -> Any:
        """Return the KL in nats per token, or the answers."""
        saved = compressed(engine, self._saved(engine))
        if self.task == "codes":
            return asked(engine, saved, self._passage)
        rows = following(engine, saved, self._following)
        return round(float((np.exp(self._right) * (self._right - rows)).sum(-1).mean()), 6)


def figures(task: str, each: list[Any]) -> dict[str, Any]:
    """Return figures with 95 % intervals over texts, or over passages, whose questions share a cache."""
    if task == "text":
        return {"kl": vars(mean(each))}
    exact, digits, nll = ([float(np.mean([q[k] for q in answers])) for answers in each] for k in range(3))
    return {"exact": vars(mean(exact)), "digits": vars(mean(digits)), "nll": vars(mean(nll))}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="the folder that keeps the built engines"
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--parts", default="10,50")
    parser.add_argument("--tasks", default="text,codes")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = earlier(NAME).get("rows", [])
    labels = [
        ("full", 1),
        *((m, int(divisor)) for m in options.methods.split(",") for divisor in options.parts.split(",")),
    ]
    full = engine_of(options.work, "h2o", 1, options.threads)
    for task, number in itertools.product(options.tasks.split(","), range(options.texts)):
        measure = None
        for method, divisor in labels:
            label = {"method": method, "divisor": divisor, "task": task}
            row = next((r for r in rows if label.items() <= r.items()), None)
            if row is None:
                rows.append(row := {**label, "each": []})
            if len(row["each"]) > number or (method, task) == ("full", "text"):
                continue
            measure = measure or Measure(task, number, full)
            engine = full if method == "full" else engine_of(options.work, method, divisor, options.threads)
            row["each"].append(figure := measure.of(engine))
            row |= figures(task, row["each"])
            save(NAME, {"length": LENGTH, "following": FOLLOWING, "rows": [r for r in rows if r["each"]]})
            print(f"{task} {number} 1/{divisor} {method}: {figure}", flush=True)


if __name__ == "__main__":
    main()
