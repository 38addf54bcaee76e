"""What KeepKV and ballot leave open, one setting at a time: accuracy and KL to the full cache at equal bytes, on the deployed engine.

    python benchmarks/sweep.py [--recipe tiny-base] [--groups decay,order] [--budgets 1/8,1/4] [--samples 24] [--length 512]

Every candidate sees the same samples. Results are added to benchmarks/results/sweep-RECIPE.json group by group; what was found is in
docs/defaults.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from common import RESULTS, save

from kvexport.evaluate.candidates import parse_budgets
from kvexport.evaluate.runner import Options, Result, evaluate

GROUPS: dict[str, list[str]] = {
    "methods": [
        *("random", "streaming", "h2o", "snapkv", "pyramidkv", "pyramidinfer", "cam", "d2o", "kvmerger", "zeromerge"),
        *("asymkv:cache.recent=0.25", "kvslimmer:cache.recent=0.25", "keepkv:zip=key", "keepkv", "ballot:cache.recent=0.3"),
    ],
    "order": [f"keepkv:zip={zip_}:order={order}" for zip_ in ("key", "vote", "mean") for order in ("merge-first", "evict-first")],
    "threshold": [f"keepkv:threshold={t}" for t in (0.5, 0.6, 0.7, 0.8, 0.9)],
    "decay": [f"keepkv:decay={a}" for a in (0.5, 0.8, 0.9, 0.95, 0.98)],
    "window": [f"keepkv:window={w}" for w in (0, 1, 8)],
    "recent": [f"keepkv:cache.recent={r}" for r in (0.1, 0.3, 0.5, 0.7, 0.9)],
    # Most of a prompt's merges happen between the chunks of its prefill; the same slack for all, so that they have the same slots.
    "chunk": [f"keepkv:export.prefill_chunk={n}:cache.merge_every=8:cache.slack=64" for n in (8, 16, 32, 64)],
    "allocation": [f"keepkv:cache.allocation.kind={kind}" for kind in ("uniform", "cosine", "pyramid")],
    "selector": ["h2o", "keepkv:selector=h2o", "pyramidinfer", "keepkv:selector=pyramidinfer:cache.allocation.kind=cosine"],
    "ballot": [
        *(f"ballot:cache.recent={r}" for r in (0.1, 0.3, 0.5, 0.75)),
        *(f"ballot:cache.recent=0.3:{setting}" for setting in ("attention=0", "attention=1", "pool=2", "zip=count", "decay=0.98")),
        "ballot:cache.recent=0.3:order=least-attended",
        "ballot:cache.recent=0.75:order=least-attended",
    ],
}


def row(result: Result) -> dict[str, object]:
    """A candidate's figures, each with its interval."""
    scores = {name: {key: value for key, value in asdict(score).items() if key != "cells"} for name, score in result.scores.items()}
    return {"label": result.label, "budget": result.budget, "slots": result.slots, "bytes": result.bytes, "scores": scores}


def line(result: Result) -> str:
    """A candidate's figures for the terminal."""
    figures = [f"{name} {score.accuracy if score.accuracy is not None else ''} KL {score.kl}" for name, score in result.scores.items()]
    return f"{result.budget:<6g} {result.label:48} " + "  ".join(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny-base")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--budgets", default="1/8,1/4")
    parser.add_argument("--tasks", default="text,multikey")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    asked = parser.parse_args()
    name = f"sweep-{Path(asked.recipe).stem}"
    path = RESULTS / f"{name}.json"
    groups = json.loads(path.read_text())["groups"] if path.exists() else {}
    settings = {"budgets": asked.budgets, "samples": asked.samples, "length": asked.length}
    for group in asked.groups.split(","):
        labels, budgets, tasks = tuple(GROUPS[group]), tuple(parse_budgets(asked.budgets)), tuple(asked.tasks.split(","))
        options = Options(labels, budgets, tasks, asked.samples, asked.length)
        found = evaluate(asked.recipe, [], options)
        print(f"{group}\n" + "\n".join(line(result) for result in found.results), flush=True)
        groups[group] = settings | {"rows": [row(result) for result in found.results]}
        save(name, {"recipe": asked.recipe, "groups": groups})


if __name__ == "__main__":
    main()
