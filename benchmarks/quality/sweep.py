"""KL of every method and setting, one setting at a time, at equal bytes on the deployed engine.

    python benchmarks/quality/sweep.py [--recipe tiny-base] [--groups decay,order] [--budgets 1/8,1/4] [--samples 24]
        [--length 512]

KL is to the full cache. Every setting gets the same samples. Results go to benchmarks/results/sweep-RECIPE.json setting
by setting, so that an interrupted run continues. A group that was measured with other options is measured from its
start again. The findings are in docs/measurements/quality.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import earlier, options_of, save
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.result import Options, Result, line
from kvexport.evaluate.runner import Run
from kvexport.evaluate.settings import parse_budgets
from kvexport.terminal import silent

GROUPS: dict[str, list[str]] = {
    "methods": [
        *("random", "streaming", "h2o", "snapkv", "pyramidkv", "pyramidinfer", "cam", "d2o", "kvmerger", "zeromerge"),
        *(
            "asymkv:cache.recent=0.25",
            "kvslimmer:cache.recent=0.25",
            "keepkv:zip=key",
            "keepkv",
            "ballot",
            "ballot:cache.recent=0.3",
            "grkv",
            "attention_matching",
        ),
    ],
    "order": [
        f"keepkv:zip={zip_}:order={order}"
        for zip_ in ("key", "vote", "mean")
        for order in ("merge-first", "evict-first")
    ],
    "threshold": [f"keepkv:threshold={t}" for t in (0.5, 0.6, 0.7, 0.8, 0.9)],
    "decay": [f"keepkv:decay={a}" for a in (0.5, 0.8, 0.9, 0.95, 0.98)],
    "window": [f"keepkv:window={w}" for w in (0, 1, 8)],
    # Equal slack, so that all have the same slots.
    "merge_every": [f"keepkv:cache.merge_every={n}:cache.slack=32" for n in (1, 4, 8, 16, 32)],
    "recent": [f"keepkv:cache.recent={r}" for r in (0.1, 0.3, 0.5, 0.7, 0.9)],
    # Most of a prompt's merges happen between the chunks of its prefill.
    "chunk": [f"keepkv:export.prefill_chunk={n}:cache.merge_every=8:cache.slack=64" for n in (8, 16, 32, 64)],
    "allocation": [f"keepkv:cache.allocation.kind={kind}" for kind in ("uniform", "cosine", "pyramid")],
    "selector": [
        "h2o",
        "keepkv:selector=h2o",
        "pyramidinfer",
        "keepkv:selector=pyramidinfer:cache.allocation.kind=cosine",
    ],
    "ballot": [
        *(f"ballot:cache.recent={r}" for r in (0.1, 0.3, 0.5, 0.75)),
        *(
            f"ballot:cache.recent=0.3:{setting}"
            for setting in ("attention=0", "attention=1", "pool=2", "zip=vote", "decay=0.98")
        ),
        "ballot:cache.recent=0.3:order=least-attended",
        "ballot:cache.recent=0.75:order=least-attended",
    ],
    # For the recipes *-listed: budgets by the cost of each layer's evictions in a text.
    "listed": ["h2o", "keepkv", "ballot"],
    "votes": [f"ballot:votes_max={n}" for n in (8, 16, 32, 64, 1_000_000)],
}

# The model whose tables compare methods text by text.
PAIRED = "smollm2-135m"


def row(result: Result, *, paired: bool) -> dict[str, Any]:
    """Return the figures of one setting: KL and accuracy by task, each with its interval."""
    scores: dict[str, dict[str, Any]] = {}
    for name, score in result.scores.items():
        figures = asdict(score)
        scores[name] = {"kl": figures["kl"], "accuracy": figures["accuracy"]}
        if paired and "kl" in score.samples:
            scores[name]["samples"] = {"kl": [float(f"{x:.6g}") for x in score.samples["kl"]]}
    return {
        "label": result.label,
        "budget": result.budget,
        "slots": result.slots,
        "bytes": result.bytes,
        "scores": scores,
    }


class Sweep:
    """The results of a recipe, to which missing ones are added."""

    def __init__(self, recipe: str, settings: list[str], again: str | None) -> None:
        self.recipe, self.settings, self.again = recipe, settings, again
        self.name = f"sweep-{Path(recipe).stem}"
        self.groups: dict[str, Any] = earlier(self.name).get("groups", {})

    def run(self, group: str, options: Options, only: Sequence[str], text: str) -> None:
        """Measure the missing rows of a group, one after another."""
        settings = {"samples": options.samples, "length": options.length, "tasks": list(options.tasks)}
        # Older results lack these keys.
        newer_keys = {"settings": self.settings, "text": text}
        group_result = self.groups.get(group, {})
        same = all(group_result.get(key) == value for key, value in settings.items())
        same = same and all(group_result.get(key, value) == value for key, value in newer_keys.items())
        rows = [
            r
            for r in (group_result["rows"] if same else [])
            if r["label"] in options.methods and not (self.again and r["label"].startswith(self.again))
        ]
        with tempfile.TemporaryDirectory() as folder:
            run = Run(self.recipe, self.settings, options, Path(folder), silent)
            order = {label: i for i, label in enumerate(options.methods)}
            there = {(r["label"], r["budget"]) for r in rows}
            missing = [c for c in run.settings if (c.label, c.budget) not in there and (c.label in only or not only)]
            full = row(run.full(), paired=False) if missing else group_result.get("full")
            for setting in missing:
                result = run.measure(setting)
                print(f"{group:12}{result.budget:<6g} {line(result)}", flush=True)
                rows.append(row(result, paired=Path(self.recipe).stem.startswith(PAIRED)))
                rows.sort(key=lambda r: (r["budget"], order[r["label"]]))
                budgets = sorted({r["budget"] for r in rows})
                self.groups[group] = {"budgets": budgets, **settings, **newer_keys, "full": full, "rows": rows}
                save(self.name, {"recipe": self.recipe, "groups": self.groups})


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--recipe", default="tiny-base")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--budgets", default="1/8,1/4")
    parser.add_argument("--tasks", default="text,decoded")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe of every run, such as backend.threads=1",
    )
    parser.add_argument("--only", metavar="A,B", default="", help="measure only these labels")
    parser.add_argument("--again", metavar="PREFIX", help="measure labels again that begin with it")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--manual", action="store_true", help="read Python's manual, not the source of its library")
    arguments = parser.parse_args()
    sweep = Sweep(arguments.recipe, arguments.set, arguments.again)
    for group in arguments.groups.split(","):
        options = Options(
            tuple(GROUPS[group]),
            tuple(parse_budgets(arguments.budgets)),
            tuple(arguments.tasks.split(",")),
            arguments.samples,
            arguments.length,
            batch=arguments.batch,
            source=manual() if arguments.manual else None,
        )
        only = [label for label in arguments.only.split(",") if label]
        sweep.run(group, options, only, "Python's manual" if arguments.manual else "source")


if __name__ == "__main__":
    main()
