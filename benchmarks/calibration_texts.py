"""How many tokens and texts a calibration of KV heads needs: the KL of engines whose budgets were calibrated on less.

    python benchmarks/calibration_texts.py --work DIR [--slots 128]

SmolLM2-135M-Instruct with `ballot` and 128 slots of a KV head on average reads the eight held-out texts of
docs/measurements/quality.md. Its budgets of KV heads come from calibrations on shorter texts, on fewer kinds of text, or on
neither; `equal` has no calibration. The figures are the mean KL to the full cache in nats, with an interval of 95 %
from a bootstrap over the texts, and the seconds of two cores that the calibration took, if it was measured in this run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from budget_kinds import COMMON, HELD_OUT, LENGTH, RECIPE, UNIFORM, Run, interval, units
from common import save

from kvexport.calibrate.head_shares import grouped, head_shares_of, samples_of
from kvexport.calibrate.measured import folder_of, measure
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


def label_of(run: Run, length: int, kinds: tuple[str, ...] | None, slots: int) -> tuple[str, float | None]:
    """Return the setting with budgets from texts of `length` tokens of these kinds, and the seconds of measuring."""
    recipe = load_setting(RECIPE, UNIFORM, slots, COMMON)
    shape = read_model(recipe)
    samples = samples_of(shape.checkpoint.path, length)
    samples = {name: sample for name, sample in samples.items() if kinds is None or name in kinds}
    known, start = _files(folder_of(recipe, shape.checkpoint)), time.perf_counter()
    measured = grouped(measure(recipe, shape, samples, length, silent))
    new = len(_files(folder_of(recipe, shape.checkpoint))) - len(known)
    shares, _ = head_shares_of(measured, slots * length // LENGTH, run.least)
    seconds = round(time.perf_counter() - start, 1) if new == len(samples) else None
    return f"ballot:cache.allocation.kind=listed:cache.allocation.shares={str(shares).replace(' ', '')}", seconds


def _files(folder: Path) -> set[Path]:
    return set(folder.glob("*.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Path, help="the folder of engines and of figures by engine")
    parser.add_argument("--slots", type=int, default=128)
    options = parser.parse_args()
    run = Run(options.work)
    rows: list[dict[str, Any]] = []
    labels: dict[str, tuple[str, float | None]] = {"equal": (UNIFORM, None)}
    labels |= {name: label_of(run, *amount, options.slots) for name, amount in AMOUNTS.items()}
    every = [label for label, _ in labels.values()]
    settings = {s.label: s for s in equal_bytes(RECIPE, every, [options.slots], LENGTH, run.geometry, COMMON)}
    for name, (label, seconds) in labels.items():
        figures = run.measure(f"amount-{options.slots}-{name}", settings[label].recipe, [HELD_OUT])[HELD_OUT]
        kl, loss = interval(units(figures, 0)), interval(units(figures, 1))
        rows.append({"calibration": name, "kl": kl, "loss": loss, "seconds": seconds})
        save("calibration-texts", {"recipe": RECIPE, "slots": options.slots, "length": LENGTH, "rows": rows})


if __name__ == "__main__":
    main()
