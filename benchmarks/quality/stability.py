"""Stability of every method and of the full cache over 20 times the training length.

    python benchmarks/quality/stability.py [--recipe tiny-base] [--training-length 1152] [--slots 64]

The figures are the loss, whether all values are finite, and the norms of cached keys. One text is read in chunks, and
its last tokens one by one. Writes benchmarks/results/stability-RECIPE.json, method by method; the tables are in
docs/measurements/long-texts.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import earlier, options_of, save
from benchmarks.quality.sweep import GROUPS
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.measure import Window
from kvexport.evaluate.result import STABILITY, Options
from kvexport.evaluate.runner import TIMES, Run
from kvexport.evaluate.settings import FULL
from kvexport.terminal import silent


def row(label: str, slots: int, windows: Sequence[Window]) -> dict[str, Any]:
    """Return the figures of one run.

    `nll` holds the loss in nats of the first and the last window that had a token to predict. `key_norm` holds the
    largest norm of a cached key at the end of the first window, and at the end of any window.
    """
    losses = [w.nll for w in windows if w.nll == w.nll]
    norms = [w.key_norm for w in windows]
    return {
        "label": label,
        "slots": slots,
        "tokens": windows[-1].end,
        "finite": all(w.finite for w in windows),
        "nll": [losses[0], losses[-1]],
        "key_norm": [norms[0], max(norms)],
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--recipe", default="tiny-base")
    parser.add_argument(
        "--training-length", type=int, default=1152, help="the longest row that the model was trained on"
    )
    parser.add_argument("--slots", type=float, default=64)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe of every run, such as backend.threads=1",
    )
    parser.add_argument("--again", metavar="PREFIX", help="measure methods again whose labels begin with it")
    parser.add_argument("--manual", action="store_true", help="read Python's manual, not the source of its library")
    arguments = parser.parse_args()
    name = f"stability-{Path(arguments.recipe).stem}"
    figures: dict[str, Any] = {
        "recipe": arguments.recipe,
        "training_length": arguments.training_length,
        "slots": arguments.slots,
        "rows": [],
    }
    before = earlier(name)
    if all(before.get(key) == figures[key] for key in ("training_length", "slots")):
        figures["rows"] = [
            r for r in before["rows"] if not (arguments.again and r["label"].startswith(arguments.again))
        ]
    labels, source = tuple(GROUPS["methods"]), manual() if arguments.manual else None
    options = Options(
        labels, (arguments.slots,), (STABILITY,), training_length=arguments.training_length, source=source
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments.recipe, arguments.set, options, Path(folder), silent)
        for label, slots in [(FULL, None), *((c.label, c.slots) for c in run.settings)]:
            if label not in [r["label"] for r in figures["rows"]]:
                new_row = row(label, slots or TIMES * run.training_length, run.stability(label, slots))
                print(new_row, flush=True)
                figures["rows"].append(new_row)
                save(name, figures)


if __name__ == "__main__":
    main()
