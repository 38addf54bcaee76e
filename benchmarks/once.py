"""Contexts that the full cache reads and that are compressed once, then gone on with and asked: SmolLM2, 1/10 and 1/50.

    python benchmarks/once.py --work DIR [--methods h2o,ballot+listed,...] [--parts 10,50] [--texts 4]
        [--tasks text,codes] [--threads 1]

text: the KL to the full cache over the 256 tokens that follow 2,000 of Python's manual. codes: `recall_real.py`'s
passages of 2,000 tokens, whose six questions are asked of copies of the cache. Every engine is built as a user would,
with `cache.merge_prompts: end`, and all methods of a part have the same slots: reference queries, of which a cache has
no need once it is compressed, are not counted. Nothing that follows the context merges. Results are added to
benchmarks/results/once.json text by text; what is there is not measured again.

A method is NAME, NAME:queries=192 (a parameter), or with +listed (measured layer budgets) and +18 (a whole layer).
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from numpy.typing import NDArray
from recall_real import passages

import kvexport
from kvexport.evaluate import recall
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.files import digest_of
from kvexport.evaluate.language import Text
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.settings import overrides_of
from kvexport.evaluate.statistics import mean
from kvexport.recipe.load import load_recipe
from kvexport.runtime.lanes import Counters, Saved

NAME = "once"
LENGTH, FOLLOWING, CHUNK, QUESTIONS = 2000, 256, 256, 6
METHODS = (
    "streaming",
    "h2o",
    "snapkv",
    "keepkv",
    "grkv:queries=192",
    "attention_matching:queries=192",
    "ballot",
    "ballot+listed",
)


def engine_of(work: Path, method: str, part: int, threads: int) -> kvexport.Engine:
    """One that is in the folder already is not built again. part: the budget is so much less than the context; 1: that
    of a full cache."""
    named, *more = method.split("+")
    settings = [
        *overrides_of(named),
        f"cache.budget={LENGTH // part if part > 1 else LENGTH + 2 * CHUNK}",
        "cache.merge_prompts=end",
        f"cache.merge_every={2 * CHUNK}",
        f"cache.allocation.whole={[int(layer) for layer in more if layer != 'listed']}",
        f"limits.max_length={LENGTH + 2 * CHUNK}",
        f"limits.max_batch={QUESTIONS}",
        f"export.prefill_chunk={CHUNK}",
        "export.logits=all",
    ]
    if "listed" in more:
        shares = load_recipe("smollm2-135m-listed", []).recipe.cache.allocation.shares
        settings += ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"]
    where = work / digest_of(settings)[:16]
    if not where.exists():
        kvexport.build(load_recipe("smollm2-135m-base", settings).recipe, where)
    return kvexport.load(where, threads=threads, verify=False)


def compressed(engine: kvexport.Engine, ids: list[int]) -> Saved:
    """A lane that has read a context, which was merged at its end."""
    lanes = engine.lanes(1)
    lanes.prefill([np.array(ids, np.int64)])
    saved = lanes.save(0)
    if lanes.merges:
        budgets = tuple(layer.budget for layer in engine.plan.layers)
        assert saved.counters == Counters(budgets, 0, len(ids)), saved.counters
    return saved


def following(engine: kvexport.Engine, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Log-probabilities [FOLLOWING, vocabulary] of what follows the context."""
    lanes = engine.lanes(1)
    lanes.restore(0, compressed(engine, ids[:LENGTH].tolist()))
    logits = lanes.append([ids[LENGTH:]], prefill=True)[0]
    assert lanes.merges == 0
    return log_softmax(logits)


def asked(engine: kvexport.Engine, given: recall.Passage) -> list[list[float]]:
    """Of every question: exact, digits, nll."""
    lanes, saved = engine.lanes(len(given.questions)), compressed(engine, given.ids)
    for lane in range(lanes.count):
        lanes.restore(lane, saved)
    found = recall.continued(lanes, given.questions)
    return [[int(a.exact), round(a.digits, 4), round(a.nll, 4)] for a in found]


class Contexts:
    """What is read, and what the full cache makes of it, once each."""

    def __init__(self, work: Path, threads: int) -> None:
        self.full = engine_of(work, "h2o", 1, threads)
        assert self.full.tokenizer is not None and not any(layer.merges for layer in self.full.plan.layers)
        language, rng = Text(self.full.tokenizer, manual()), np.random.default_rng(1000)
        self._texts = [np.array(language.text(rng, LENGTH + FOLLOWING)[0], np.int64) for _ in range(16)]
        self.text = cache(lambda i: (self._texts[i], following(self.full, self._texts[i])))
        self.codes = cache(lambda i: passages(self.full, "codes", i + 1, LENGTH)[i])


def measured(contexts: Contexts, engine: kvexport.Engine, task: str, i: int) -> Any:
    """KL of a text in nats per token, or the answers to a passage."""
    if task == "codes":
        return asked(engine, contexts.codes(i))
    ids, right = contexts.text(i)
    return round(float((np.exp(right) * (right - following(engine, ids))).sum(-1).mean()), 6)


def figures(task: str, each: list[Any]) -> dict[str, Any]:
    """With 95 % intervals over texts; of answers over passages, whose questions share a cache."""
    if task == "text":
        return {"kl": vars(mean(each))}
    exact, digits, nll = (([float(np.mean([q[k] for q in answers])) for answers in each]) for k in range(3))
    return {"exact": vars(mean(exact)), "digits": vars(mean(digits)), "nll": vars(mean(nll))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="engines are built there, and kept")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--parts", default="10,50")
    parser.add_argument("--tasks", default="text,codes")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    contexts = Contexts(options.work, options.threads)
    labels = [("full", 1), *((m, int(part)) for part in options.parts.split(",") for m in options.methods.split(","))]
    for method, part in labels:
        engine = None
        for task in options.tasks.split(","):
            if (method, task) == ("full", "text"):
                continue
            label = {"method": method, "part": part, "task": task}
            row = next((r for r in rows if all(r[key] == value for key, value in label.items())), None)
            if row is None:
                rows.append(row := {**label, "each": []})
            for i in range(len(row["each"]), options.texts):
                engine = engine or (
                    contexts.full if method == "full" else engine_of(options.work, method, part, options.threads)
                )
                row["each"].append(measured(contexts, engine, task, i))
                row |= figures(task, row["each"])
                save(NAME, {"length": LENGTH, "following": FOLLOWING, "rows": rows})
            shown = {key: f"{x['value']:.3f}" for key, x in row.items() if isinstance(x, dict)}
            print(f"{task:6} 1/{part:<3} {method:34} {len(row['each'])} {shown}", flush=True)


if __name__ == "__main__":
    main()
