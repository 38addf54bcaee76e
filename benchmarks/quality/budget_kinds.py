"""Measured budgets of KV heads on kinds of text that the calibration did not see, on the deployed engine.

    python benchmarks/quality/budget_kinds.py --work DIR [--budgets 64,128,256] [--methods h2o,keepkv]

For each kind of text that a build calibrates on, the budgets of KV heads of SmolLM2-135M-Instruct are calibrated on all
*other* kinds. Engines in these budgets, and engines of other methods with equal budgets, read the text of the kind that
was left out. All engines have caches of equal bytes. The figures are the KL to the full cache and the loss that the
cache adds, in nats over the second half of the text. The kind `held-out` has the eight texts of
docs/measurements/quality.md; its budgets are those of a build, which are calibrated on all kinds.

Every engine's figures are kept in --work, so a run that was interrupted goes on. The intervals of 95 % come from a
bootstrap over blocks of 32 positions of one text, or over the eight texts of `held-out`. The results are
benchmarks/results/budget-kinds-SLOTS.json, one file for each budget.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import options_of, save
from kvexport.calibrate.head_shares import grouped, head_shares_of, samples_of
from kvexport.calibrate.measured import measure
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Text
from kvexport.evaluate.measure import counted_rows
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.settings import FULL, equal_bytes, load_setting
from kvexport.evaluate.tasks import Sample, make_samples
from kvexport.export.build import build, read_model, share_weights
from kvexport.language.tokenizer import Tokenizer
from kvexport.plan.budgets import least_slots
from kvexport.recipe.fields import Recipe
from kvexport.terminal import silent

RECIPE, LENGTH = "smollm2-135m-base", 1024
COMMON = [
    "export.logits=all",
    "limits.max_batch=1",
    f"limits.max_length={LENGTH}",
    "backend.threads=1",
    "export.prefill_chunk=32",
    "cache.merge_every=8",
]
PUBLISHED = ("streaming", "h2o", "snapkv", "zeromerge", "keepkv")
UNIFORM, HEADS = "ballot", "ballot, budgets of heads"
HELD_OUT = "held-out"
BLOCK, DRAWS = 32, 2000

Figures = dict[str, list[list[float]]]  # by kind: a row of KL and a row of loss for each text, by block of positions


def texts(checkpoint: Path) -> dict[str, list[Sample]]:
    """Return the texts by kind: one of every kind of a calibration but the answers, and eight of Python's manual."""
    kinds = {kind: [sample] for kind, sample in samples_of(checkpoint, LENGTH).items() if "/" not in kind}
    language = Text(Tokenizer.from_folder(checkpoint), manual())
    return kinds | {HELD_OUT: make_samples("text", language, 8, LENGTH, 0)}


def predictions(engine: Engine, sample: Sample) -> NDArray[np.float32]:
    """Return the log-probabilities [evaluated, vocabulary] of one text."""
    rows = [log_softmax(logits).astype(np.float32) for _, _, logits in counted_rows(engine, [sample])]
    return np.concatenate(rows)


def compared(engine: Engine, sample: Sample, full: NDArray[np.float32]) -> list[list[float]]:
    """Return the mean KL to the full cache and the mean added loss by block of positions, in nats."""
    logs, truth = predictions(engine, sample), np.array([sample.ids[p + 1] for p in sample.counted])
    each = np.arange(len(truth))
    kl = (np.exp(full.astype(np.float64)) * (full - logs)).sum(-1)
    loss = full[each, truth] - logs[each, truth]
    starts = range(0, len(truth) - BLOCK + 1, BLOCK)
    return [[float(x[s : s + BLOCK].mean()) for s in starts] for x in (kl, loss)]


def interval(values: NDArray[np.float64], others: NDArray[np.float64] | None = None) -> list[float]:
    """Return the mean of `values` [units], or of their difference to `others`, with its bootstrap interval of 95 %."""
    units = values if others is None else values - others
    draws = np.random.default_rng(0).integers(0, len(units), (DRAWS, len(units)))
    low, high = np.quantile(units[draws].mean(1), (0.025, 0.975))
    return [round(float(x), 5) for x in (units.mean(), low, high)]


class Run:
    """The model, its texts, the full cache's predictions, and the figures of the engines measured so far."""

    def __init__(self, work: Path) -> None:
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        recipe = load_setting(RECIPE, UNIFORM, 128, COMMON)
        shape = read_model(recipe)
        self.geometry, self.least = shape.geometry, least_slots(recipe)
        checkpoint = shape.checkpoint.path
        samples = samples_of(checkpoint, LENGTH)
        self.measured = grouped(measure(recipe, shape, samples, LENGTH, silent))
        self.texts = texts(checkpoint)
        self.weights = share_weights(recipe, work / "weights")
        engine = self.engine(load_setting(RECIPE, FULL, None, COMMON))
        self.full = {kind: [predictions(engine, x) for x in each] for kind, each in self.texts.items()}

    def engine(self, recipe: Recipe) -> Engine:
        return load(build(recipe, self.work / "engine", shared=self.weights), verify=False)

    def label_of(self, kind: str, slots: int) -> str:
        """Return the method `ballot` with budgets of KV heads that are calibrated on all kinds of text but `kind`."""
        costs = {name: cost for name, cost in self.measured.costs.items() if name != kind}
        others = replace(self.measured, costs=costs)
        shares, _ = head_shares_of(others, slots, self.least)
        rows = json.dumps(shares).replace(" ", "")
        return f"ballot:cache.allocation.kind=listed:cache.allocation.shares={rows}"

    def measure(self, name: str, recipe: Recipe, kinds: Sequence[str]) -> Figures:
        """Return the figures of an engine on the texts of some kinds, from the folder if it was measured before."""
        file = self.work / f"{name.replace('/', '-').replace(' ', '_')}.json"
        if not file.exists():
            engine = self.engine(recipe)
            found = {
                kind: [compared(engine, *pair) for pair in zip(self.texts[kind], self.full[kind], strict=True)]
                for kind in kinds
            }
            file.write_text(json.dumps(found))
        figures: dict[str, list[Any]] = json.loads(file.read_text())
        for kind, each in figures.items():
            print(f"{name:40s} {kind:10s} KL {np.mean([x[0] for x in each]):.4f}", flush=True)
        return figures


def units(figures: list[Any], which: int) -> NDArray[np.float64]:
    """Return the units of the bootstrap: the blocks of one text, or the means of several texts."""
    if len(figures) == 1:
        return np.array(figures[0][which])
    return np.array([np.mean(text[which]) for text in figures])


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="the folder of engines and of figures by engine")
    parser.add_argument("--budgets", default="64,128,256", help="slots of a KV head on average")
    parser.add_argument("--methods", default=",".join(PUBLISHED), help="published methods, with equal budgets")
    arguments = parser.parse_args()
    run, published = Run(arguments.work), arguments.methods.split(",")
    kinds = list(run.texts)
    for slots in map(int, arguments.budgets.split(",")):
        left_out = {run.label_of(kind, slots): kind for kind in kinds}
        labels = [*published, UNIFORM, *left_out]
        settings = {s.label: s for s in equal_bytes(RECIPE, labels, [slots], LENGTH, run.geometry, COMMON)}
        found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        for label in (*published, UNIFORM):
            for kind, figures in run.measure(f"{label}-{slots}", settings[label].recipe, kinds).items():
                found[kind][label] = figures
        for label, kind in left_out.items():
            figures = run.measure(f"heads-{slots}-without-{kind}", settings[label].recipe, [kind])
            found[kind][HEADS] = figures[kind]
        rows: list[dict[str, Any]] = []
        for kind, methods in found.items():
            kl = {name: units(figures, 0) for name, figures in methods.items()}
            loss = {name: units(figures, 1) for name, figures in methods.items()}
            rows.append(
                {
                    "slots": slots,
                    "kind": kind,
                    "texts": len(run.texts[kind]),
                    "kl": {name: interval(values) for name, values in kl.items()},
                    "loss": {name: interval(values) for name, values in loss.items()},
                    "kl over uniform": interval(kl[HEADS], kl[UNIFORM]),
                    "loss over uniform": interval(loss[HEADS], loss[UNIFORM]),
                }
            )
        save(f"budget-kinds-{slots}", {"recipe": RECIPE, "length": LENGTH, "rows": rows})


if __name__ == "__main__":
    main()
