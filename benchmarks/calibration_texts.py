"""How many tokens and texts a calibration of KV heads needs: the KL of engines whose budgets were calibrated on less.

    python benchmarks/calibration_texts.py --work DIR [--slots 128]

SmolLM2-135M-Instruct with `ballot` and 128 slots of a KV head on average reads the eight held-out texts of
docs/measurements/quality.md. Its budgets of KV heads come from calibrations on shorter texts or on fewer kinds of text;
`equal` has no calibration. The figures are the mean KL to the full cache and the loss that the cache adds, in nats,
with intervals of 95 % from a bootstrap over the texts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from budget_kinds import COMMON, HELD_OUT, LENGTH, RECIPE, UNIFORM, Run, interval, units
from common import save

from kvexport.calibrate.head_shares import grouped, head_shares_of, samples_of
from kvexport.calibrate.measured import measure
from kvexport.evaluate.settings import equal_bytes, load_setting
from kvexport.export.build import read_model
from kvexport.terminal import silent

FEW = ("prose", "python")
FOUR = ("prose", "chat", "german", "python")
AMOUNTS = {
    "ten texts of 1,024 tokens": (1024, None),
    "ten texts of 512 tokens": (512, None),
    "ten texts of 256 tokens": (256, None),
    "prose, chat, German and Python, 1,024 tokens": (1024, FOUR),
    "prose and Python, 1,024 tokens": (1024, FEW),
    "prose, 1,024 tokens": (1024, FEW[:1]),
}


def label_of(run: Run, length: int, kinds: tuple[str, ...] | None, slots: int) -> str:
    """Return the setting with budgets that are calibrated on texts of `length` tokens of these kinds."""
    recipe = load_setting(RECIPE, UNIFORM, slots, COMMON)
    shape = read_model(recipe)
    samples = samples_of(shape.checkpoint.path, length)
    samples = {name: sample for name, sample in samples.items() if kinds is None or name in kinds}
    measured = grouped(measure(recipe, shape, samples, length, silent))
    shares, _ = head_shares_of(measured, slots * length // LENGTH, run.least)
    return f"ballot:cache.allocation.kind=listed:cache.allocation.shares={str(shares).replace(' ', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Path, help="the folder of engines and of figures by engine")
    parser.add_argument("--slots", type=int, default=128)
    options = parser.parse_args()
    run = Run(options.work)
    rows: list[dict[str, Any]] = []
    labels = {"equal": UNIFORM}
    labels |= {name: label_of(run, *amount, options.slots) for name, amount in AMOUNTS.items()}
    settings = equal_bytes(RECIPE, list(labels.values()), [options.slots], LENGTH, run.geometry, COMMON)
    recipes = {setting.label: setting.recipe for setting in settings}
    for name, label in labels.items():
        figures = run.measure(f"amount-{options.slots}-{name}", recipes[label], [HELD_OUT])[HELD_OUT]
        rows.append({"calibration": name, "kl": interval(units(figures, 0)), "loss": interval(units(figures, 1))})
        save("calibration-texts", {"recipe": RECIPE, "slots": options.slots, "length": LENGTH, "rows": rows})


if __name__ == "__main__":
    main()
