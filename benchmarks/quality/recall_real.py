"""Recall of SmolLM2: facts that stand in a long text and are asked for at its end, by method and budget.

    python benchmarks/quality/recall_real.py [--tasks codes,people,code,turns] [--methods h2o,...] [--parts 3,4,8]
        [--length 2000] [--passages 9] [--known]

Budgets are 1/8, 1/4 and 1/3 of the text. Whole layers and measured budgets of KV heads are compared with uniform
budgets of as many slots. Every engine is built as a user would build it. All methods get the same passages. Each
passage is read once, and its six questions are asked of copies of the cache. Results are added to
benchmarks/results/recall-smollm2.json as they are measured. Results that the file already holds are not measured again.
Intervals are Wilson's at 95 %. Differences to the best published method are over the same questions, with the
bootstrap's interval.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import kvexport
from benchmarks.common import earlier, head, options_of, save
from benchmarks.quality import recall
from kvexport.evaluate.corpus import library_sources
from kvexport.evaluate.recall import Passage, passage
from kvexport.evaluate.statistics import Estimate, mean, share
from kvexport.files import json_digest
from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.methods.slots import Slots
from kvexport.recipe.load import load_recipe

NAME = "recall-smollm2"
RECALL = "smollm2-135m-recall"
QUESTIONS = 6
# The whole layers, measured on another text and other facts.
WHOLE = (7, 8, 17, 18, 23)
PUBLISHED = ("streaming", "h2o", "snapkv", "keepkv", "keydiff")
ALL = ("full", *PUBLISHED, "ballot", "streaming+whole", "h2o+whole", "snapkv+whole", "keepkv+whole", "ballot+whole")
HEADS = "smollm2-135m-heads"  # the recipe whose budgets of KV heads methods with +heads use
CITIES = [
    "Paris",
    "London",
    "Berlin",
    "Madrid",
    "Rome",
    "Vienna",
    "Moscow",
    "Cairo",
    "Tokyo",
    "Lima",
    "Oslo",
    "Athens",
    "Boston",
    "Dublin",
    "Chicago",
]
NAMES = ["Anna", "Boris", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Kevin", "Laura", "Martin"]
JOBS = ["teacher", "doctor", "lawyer", "farmer", "painter", "baker", "nurse", "pilot", "writer", "singer"]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = f"{SYSTEM}<|im_start|>user\n"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
LICENCES = Path("/usr/share/common-licenses")  # part of Debian


class KeyDiff(Method):
    """KeyDiff (arXiv 2504.15364): evict the keys most similar to the others, by their cosine to the mean of all keys.

    kvexport does not have this method. It evicts after every chunk, so evicted keys leave the mean.
    """

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keys that differ from the mean key are kept; the rest is dropped"
    source: ClassVar[str] = "arXiv 2504.15364"

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return the negative cosine [B, H, C]."""
        key = slots.key.float()
        key = key / torch.clamp((key * key).sum(-1, keepdim=True).sqrt(), min=1e-12)
        # The length of the mean does not change the order, so it is not normalised.
        anchor = torch.where((slots.votes > 0)[..., None], key, 0.0).sum(2, keepdim=True)
        return -(key * anchor).sum(-1)


def sentences(task: str, rng: random.Random, length: int) -> list[str]:
    """Return the sentences (lines for code) of a text longer than `length` tokens, in which facts are to stand."""
    if task == "code":
        sources = library_sources(True)
        start = rng.choice([path for path, source in sources.items() if len(source) > 20_000])
        return [line for line in sources[start].splitlines() if line.strip()]
    texts = [(LICENCES / name).read_text(encoding="utf-8") for name in ("GPL-3", "GFDL-1.3", "LGPL-2.1", "MPL-2.0")]
    text = rng.choice([text for text in texts if len(text) > 5 * length])
    sentences = re.split(r"(?<=[.:;]) ", " ".join(text.split()))
    return sentences[rng.randrange(20) :]


def facts(task: str, rng: random.Random) -> list[tuple[str, str, str]]:
    """Return the facts of a passage as (statement, question, answer)."""
    numbers = [f"{rng.randrange(10_000):04}" for _ in range(QUESTIONS)]
    if task == "code":
        names = rng.sample(CITIES, QUESTIONS)
        return [(f"\nPORT_{c.upper()} = {n}\n", f"PORT_{c.upper()} =", n) for c, n in zip(names, numbers, strict=True)]
    if task == "people":
        names, half = rng.sample(NAMES, QUESTIONS // 2), QUESTIONS // 2
        work, live = zip(names, rng.sample(JOBS, half), strict=True), zip(names, rng.sample(CITIES, half), strict=True)
        return [(f"{n} works as a {j}.", f"{n} works as a", j) for n, j in work] + [
            (f"{n} lives in {c}.", f"{n} lives in", c) for n, c in live
        ]
    stems = [f"The secret number of {city} is" for city in rng.sample(CITIES, QUESTIONS)]
    facts = [(f"{s} {n}.", s, n) for s, n in zip(stems, numbers, strict=True)]
    if task != "turns":
        return facts
    turn = "{}?" + ANSWER + "{}"
    return [(whole, turn.format(s.replace("The", "What is the").removesuffix(" is"), s), n) for whole, s, n in facts]


def passages(engine: kvexport.Engine, task: str, count: int, length: int) -> list[Passage]:
    assert engine.tokenizer is not None

    def encode(text: str) -> list[int]:
        return [int(i) for i in engine.tokenizer.encode(text, add_special_tokens=False)]  # type: ignore[union-attr]

    frames = {
        "turns": (USER, f"{ANSWER}I have read all of it. What do you want to know?<|im_end|>\n<|im_start|>user\n"),
        "code": ("", "\n\n"),
    }
    drawn = []
    for i in range(count):
        rng = random.Random(f"{task}/{i}")
        text, stated = sentences(task, rng, length), facts(task, rng)
        places = np.random.default_rng([i, length])
        drawn.append(passage(encode, text, stated, length, places, frames.get(task, (USER, "\n\n"))))
    return drawn


def whole_layers(method: str) -> list[int]:
    """Return the whole layers that a method's name asks for.

    "h2o" and "h2o+heads" have none, "h2o+whole" has the measured `WHOLE`, and "h2o+8+18" has layers 8 and 18.
    """
    named = [name for name in method.split("+")[1:] if name != "heads"]
    return list(WHOLE) if named == ["whole"] else [int(layer) for layer in named]


def engine_of(folder: Path, label: dict[str, Any], threads: int) -> kvexport.Engine:
    """Return the engine of a row; an artifact that the folder already holds is not built again."""
    method, divisor, length = label["method"], label["divisor"], label["length"]
    settings = [
        f"cache.method={method.split('+')[0]}",
        f"cache.budget={length // divisor}",
        f"cache.allocation.whole={whole_layers(method)}",
        f"limits.max_length={length + 128}",
        f"limits.max_batch={QUESTIONS}",
        f"export.prefill_chunk={length + 128 if label['known'] else 256}",
        *label["set"],
    ]
    if method.endswith("+heads"):
        shares = load_recipe(HEADS).recipe.cache.allocation.shares
        settings += ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"]
    where = folder / json_digest(settings)[:16]
    if not where.exists():
        kvexport.build(load_recipe("smollm2-135m-base", settings).recipe, where)
    return kvexport.load(where, threads=threads, verify=False)


Each = list[list[float]]  # for every answer: whether it is exact (1 or 0), and the share of its digits that are right


def row(label: dict[str, Any], each: Each) -> dict[str, Any]:
    """Return the figures of one engine and task, and the exactness and the share of right digits of every answer."""
    exact, digits = zip(*each, strict=True)
    right = share(int(sum(exact)), len(each))
    return {
        **label,
        "provenance": {key: value for key, value in head().items() if key != "machine"},
        "questions": len(each),
        "exact": [right.value, right.low, right.high],
        "digits": vars(mean(digits)),
        "exact_each": list(exact),
        "digits_each": list(digits),
    }


def _difference(row: dict[str, Any], base: dict[str, Any], figure: str) -> Estimate:
    """Return the mean difference of two rows over the questions that both were asked, with its interval."""
    return mean([float(a - b) for a, b in zip(row[figure], base[figure], strict=False)])


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the difference of every row to the best published method in the same place, over the questions of both.

    The best method has the most exact answers, then the most right digits.
    """
    differences = []
    for r in rows:
        place = {k: r[k] for k in ("task", "divisor", "length", "known")}
        others = [o for o in rows if o["method"] in PUBLISHED and all(o[k] == v for k, v in place.items())]
        if others and r["method"] not in PUBLISHED:
            best = max(others, key=lambda o: (o["exact"][0], o["digits"]["value"]))
            differences.append(
                {
                    **place,
                    "method": r["method"],
                    "best_published": best["method"],
                    "exact": vars(_difference(r, best, "exact_each")),
                    "digits": vars(_difference(r, best, "digits_each")),
                }
            )
    return differences


class Results:
    """The file of results. It is read again before every change."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> dict[str, Any]:
        """Return all recorded results."""
        before = earlier(self.name)
        return {key: before.get(key, []) for key in ("layers", "rows", "differences", "text")}

    def find(self, label: dict[str, Any]) -> Each:
        """Return the recorded answers of a label."""
        same = (r for r in self.read()["rows"] if all(r[k] == v for k, v in label.items()))
        return next(([list(pair) for pair in zip(r["exact_each"], r["digits_each"], strict=True)] for r in same), [])

    def put(self, label: dict[str, Any], each: Each) -> dict[str, Any]:
        """Write a row in place of the row with the same label and fewer questions."""
        new, result = row(label, each), self.read()
        at = [i for i, r in enumerate(result["rows"]) if all(r[k] == v for k, v in label.items())]
        if at:
            result["rows"][at[0]] = new
        else:
            result["rows"].append(new)
        result["differences"] = differences([r for r in result["rows"] if not r["set"]])
        save(self.name, result)
        return new


def ask(options: argparse.Namespace, folder: Path, results: Results) -> None:
    """Ask all questions of every method, passage by passage."""
    for method in options.methods.split(","):
        for divisor in [3] if method == "full" else map(int, options.parts.split(",")):
            engine = None
            for task in options.tasks.split(","):
                known = options.known and method != "full"
                label = {"task": task, "method": method, "divisor": divisor, "length": options.length, "known": known}
                label["set"] = options.set
                each = results.find(label)
                if len(each) >= options.passages * QUESTIONS:
                    continue
                engine = engine or engine_of(folder, label, options.threads)
                for text in passages(engine, task, options.passages, options.length)[len(each) // QUESTIONS :]:
                    answers = recall.answers(engine, text, known=known)
                    each += [[int(a.exact), round(a.digits, 4)] for a in answers]
                    r = results.put(label, each)
                print(
                    f"{task:7} {method:16} 1/{divisor}{' known' if known else ''}: exact "
                    f"{r['exact'][0]:.2f} [{r['exact'][1]:.2f}, {r['exact'][2]:.2f}], digits "
                    f"{r['digits']['value']:.2f}",
                    flush=True,
                )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tasks", default="codes,people,code,turns")
    parser.add_argument("--methods", default=",".join(ALL))
    parser.add_argument("--parts", default="3,4,8")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--passages", type=int, default=9)
    parser.add_argument("--known", action="store_true", help="put the question into the chunk that is compressed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep the built engines in this folder, for later runs"
    )
    parser.add_argument("--name", default=NAME, help="the name of the file of results")
    options = parser.parse_args()
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    all_methods()[KeyDiff.name] = KeyDiff  # so that recipes of this process can name it
    with tempfile.TemporaryDirectory() as folder:
        ask(options, options.work or Path(folder), Results(options.name))


if __name__ == "__main__":
    main()
