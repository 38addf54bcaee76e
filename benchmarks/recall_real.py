"""Recall of a real model: facts told in a long text and asked for at its end, at budgets of 1/8, 1/4 and 1/3 of it,
method by method; whole layers beside uniform budgets of the same slots.

    python benchmarks/recall_real.py layers                     # which layers recall hangs on, on another text
    python benchmarks/recall_real.py [--tasks codes,people,code,turns] [--methods h2o,...] [--parts 3,4,8]
        [--length 2000] [--passages 9] [--known]

Every engine is built as a user would; all methods see the same passages, read once each, and their six questions are
asked of copies of the cache. Results are added to benchmarks/results/recall-smollm2.json as they come; what is there
is not measured again. Intervals are Wilson's at 95 %; differences to the best published method are of the same
questions, with the bootstrap's interval.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save

import kvexport
from kvexport.evaluate import recall
from kvexport.evaluate.corpus import library_sources
from kvexport.evaluate.statistics import mean, share
from kvexport.recipe.load import load_recipe
from kvexport.validate.tokens import TEXT

NAME = "recall-smollm2"
QUESTIONS = 6
# By `layers`, on another text and other facts.
WHOLE = (7, 8, 17, 18, 23)
PUBLISHED = ("streaming", "h2o", "snapkv", "keepkv")
ALL = ("full", *PUBLISHED, "ballot", "streaming+whole", "h2o+whole", "snapkv+whole", "keepkv+whole", "ballot+whole")
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
THINGS = [
    "library",
    "kitchen",
    "garden",
    "bank",
    "museum",
    "hospital",
    "school",
    "church",
    "theatre",
    "station",
    "airport",
    "factory",
]
NAMES = ["Anna", "Boris", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Kevin", "Laura", "Martin"]
JOBS = ["teacher", "doctor", "lawyer", "farmer", "painter", "baker", "nurse", "pilot", "writer", "singer"]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = f"{SYSTEM}<|im_start|>user\n"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
LICENCES = Path("/usr/share/common-licenses")  # of Debian


def sentences(task: str, rng: random.Random) -> list[str]:
    """The text that facts stand in."""
    if task == "layers":
        text = TEXT.read_text(encoding="utf-8")
    elif task == "code":
        sources = library_sources(True)
        start = rng.choice([path for path, source in sources.items() if len(source) > 20_000])
        return [line for line in sources[start].splitlines() if line.strip()]
    else:
        name = rng.choice(["GPL-3", "GFDL-1.3", "LGPL-2.1", "MPL-2.0"])
        text = (LICENCES / name).read_text(encoding="utf-8")
    found = re.split(r"(?<=[.:;]) ", " ".join(text.split()))
    return found[rng.randrange(20) :]


def facts(task: str, rng: random.Random) -> list[tuple[str, str, str]]:
    """(statement, question, answer)."""
    numbers = [f"{rng.randrange(10_000):04}" for _ in range(QUESTIONS)]
    if task == "layers":
        said = [f"The code of the {thing} is" for thing in rng.sample(THINGS, QUESTIONS)]
    elif task == "code":
        names = rng.sample(CITIES, QUESTIONS)
        return [(f"\nPORT_{c.upper()} = {n}\n", f"PORT_{c.upper()} =", n) for c, n in zip(names, numbers, strict=True)]
    elif task == "people":
        names, half = rng.sample(NAMES, QUESTIONS // 2), QUESTIONS // 2
        work, live = zip(names, rng.sample(JOBS, half), strict=True), zip(names, rng.sample(CITIES, half), strict=True)
        return [(f"{n} works as a {j}.", f"{n} works as a", j) for n, j in work] + [
            (f"{n} lives in {c}.", f"{n} lives in", c) for n, c in live
        ]
    else:
        said = [f"The secret number of {city} is" for city in rng.sample(CITIES, QUESTIONS)]
    made = [(f"{s} {n}.", s, n) for s, n in zip(said, numbers, strict=True)]
    if task != "turns":
        return made
    turn = "{}?" + ANSWER + "{}"
    return [(whole, turn.format(s.replace("The", "What is the").removesuffix(" is"), s), n) for whole, s, n in made]


def passages(engine: kvexport.Engine, task: str, count: int, length: int) -> list[recall.Passage]:
    """The same for every engine."""
    assert engine.tokenizer is not None

    def encode(text: str) -> list[int]:
        return [int(i) for i in engine.tokenizer.encode(text, add_special_tokens=False)]  # type: ignore[union-attr]

    frames = {
        "turns": (USER, f"{ANSWER}I have read all of it. What do you want to know?<|im_end|>\n<|im_start|>user\n"),
        "code": ("", "\n\n"),
    }
    made = []
    for i in range(count):
        rng = random.Random(f"{task}/{i}")
        text, told = sentences(task, rng), facts(task, rng)
        places = np.random.default_rng([i, length])
        made.append(recall.passage(encode, text, told, length, places, frames.get(task, (USER, "\n\n"))))
    return made


def engine_of(
    folder: Path, method: str, part: int, length: int, known: bool, threads: int, sets: list[str]
) -> kvexport.Engine:
    """method: "h2o", or "h2o+whole"; part: the budget is so much less than the length."""
    name, whole = method.removesuffix("+whole"), method.endswith("+whole")
    settings = [
        f"cache.method={name}",
        f"cache.budget={length // part}",
        f"cache.allocation.whole={list(WHOLE) if whole else []}",
        f"limits.max_length={length + 128}",
        f"limits.max_batch={QUESTIONS}",
        f"export.prefill_chunk={length + 128 if known else 256}",
        *sets,
    ]
    where = kvexport.build(load_recipe("smollm2-135m-base", settings).recipe, folder)
    return kvexport.load(where, threads=threads)


def row(label: dict[str, Any], found: list[recall.Answer]) -> dict[str, Any]:
    """What is written of one engine and task."""
    exact = share(sum(a.exact for a in found), len(found))
    return {
        **label,
        "questions": len(found),
        "exact": [exact.value, exact.low, exact.high],
        "digits": vars(mean([a.digits for a in found])),
        "nll": vars(mean([a.nll for a in found])),
        "each": [[int(a.exact), round(a.digits, 4)] for a in found],
    }


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every row to the published method of most exact answers (then digits) in the same place."""
    found = []
    for r in rows:
        place = {k: r[k] for k in ("task", "part", "length", "known")}
        others = [o for o in rows if o["method"] in PUBLISHED and all(o[k] == v for k, v in place.items())]
        if others and r["method"] not in PUBLISHED:
            best = max(others, key=lambda o: (o["exact"][0], o["digits"]["value"]))
            pairs = list(zip(r["each"], best["each"], strict=True))
            found.append(
                {
                    **place,
                    "method": r["method"],
                    "best_published": best["method"],
                    "exact": vars(mean([float(a[0] - b[0]) for a, b in pairs])),
                    "digits": vars(mean([a[1] - b[1] for a, b in pairs])),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="ask", choices=["ask", "layers"])
    parser.add_argument("--tasks", default="codes,people,code,turns")
    parser.add_argument("--methods", default=",".join(ALL))
    parser.add_argument("--parts", default="3,4,8")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--passages", type=int, default=9)
    parser.add_argument("--known", action="store_true", help="the question is part of the chunk that is compressed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", default=NAME, help="of the file of results")
    options = parser.parse_args()
    path = RESULTS / f"{options.name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    result = {key: before.get(key, []) for key in ("layers", "rows", "differences")}
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "layers":
            engine = engine_of(Path(folder) / "full", "full", 1, options.length, False, options.threads, [])
            given = passages(engine, "layers", options.passages, options.length)
            cost = recall.retrieval_layers(engine, given)
            result["layers"] = {"length": options.length, "passages": options.passages, "nats": cost.round(4).tolist()}
            print(*(f"layer {i}: {cost[i]:.3f} nats" for i in np.argsort(-cost)[:10]), sep="\n")
            save(options.name, result)
            return
        for method in options.methods.split(","):
            for part in [3] if method == "full" else map(int, options.parts.split(",")):
                engine = None
                for task in options.tasks.split(","):
                    label = {"task": task, "method": method, "part": part, "length": options.length}
                    label |= {"known": options.known and method != "full", "set": options.set}
                    if any(all(r[k] == v for k, v in label.items()) for r in result["rows"]):
                        continue
                    where = Path(folder) / f"{method}-{part}"
                    engine = engine or engine_of(
                        where, method, part, options.length, options.known, options.threads, options.set
                    )
                    given = passages(engine, task, options.passages, options.length)
                    found = [a for p in given for a in recall.answers(engine, p, known=label["known"])]
                    result["rows"].append(row(label, found))
                    result["differences"] = differences([r for r in result["rows"] if not r["set"]])
                    save(options.name, result)
                    r = result["rows"][-1]
                    print(
                        f"{task:7} {method:16} 1/{part}{' known' if label['known'] else ''}: exact "
                        f"{r['exact'][0]:.2f} [{r['exact'][1]:.2f}, {r['exact'][2]:.2f}], digits "
                        f"{r['digits']['value']:.2f}, nll {r['nll']['value']:.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
