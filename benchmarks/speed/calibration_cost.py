"""Time and memory of measuring the budgets of KV heads, as a build does it.

    python benchmarks/speed/calibration_cost.py [--shapes smollm2 1b 7b] [--tokens 1024] [--work DIR] [--keep]

smollm2 is SmolLM2-135M-Instruct (`make smollm2`); 1b and 7b are Llamas of 1.1B and 7B random weights in bfloat16. Each
shape measures one text of random tokens with `ballot` in a process of its own. A build measures ten texts; the
figure of ten texts is the time of one text times ten. The peak is the kernel's figure for the finished process, mapped
files included; `start` is the resident memory just before the measurement, and `estimate` is what the build compares
with the free memory. Rows of other shapes stay in the result. The checkpoints are removed unless --keep is given.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import WORK, earlier, make_checkpoint_apart, options_of, save
from benchmarks.speed.export import measured

TEXTS = 10  # that a build measures
SMOLLM2 = "smollm2-135m-base"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_text(model: str, tokens: int) -> dict[str, float]:
    """Measure one text of random tokens, and return the seconds and the megabytes beside those of the process."""
    from kvexport.calibrate.head_costs import HeadCosts
    from kvexport.calibrate.measured import budgets_of, memory_of
    from kvexport.export.build import read_model
    from kvexport.plan.budgets import least_slots
    from kvexport.recipe.load import load_recipe

    settings = ["cache.method=ballot", "cache.budget=128", f"limits.max_length={max(tokens, 1024)}"]
    recipe = load_recipe(model, settings).recipe
    shape = read_model(recipe)
    ids = [int(x) for x in np.random.default_rng(0).integers(3, shape.model.config.vocab_size, tokens)]
    budgets, counted = budgets_of(tokens, least_slots(recipe)), list(range(tokens // 2, tokens - 1))
    before, start = resident_bytes(), time.perf_counter()
    HeadCosts(recipe, shape).of_text(ids, counted, lambda _: budgets)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        "start_megabytes": round(before / 1e6),
        "estimate_megabytes": round(memory_of(shape, tokens) / 1e6),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["smollm2", "1b", "7b"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--keep", action="store_true", help="do not remove the checkpoints")
    parser.add_argument("--one", metavar="RECIPE", help="measure one text of this recipe in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_text(options.one, options.tokens)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = earlier("calibration-cost").get("rows", {})
    for shape in options.shapes:
        recipe = SMOLLM2
        if shape != "smollm2":
            recipe = str(options.work / f"{shape}.yaml")
            path = make_checkpoint_apart(shape, options.work.absolute() / f"{shape}-bfloat16", "bfloat16")
            Path(recipe).write_text(f"model: {{path: {path}, dtype: float16}}\n")
        out = options.work / "figures.json"
        command = [sys.executable, __file__, "--one", recipe, "--tokens", str(options.tokens)]
        run = measured(["sh", "-c", f'"$@" > {out}', "sh", *command], dict(os.environ))
        figures = json.loads(out.read_text())
        rows[f"{shape} {options.tokens}"] = {
            "shape": shape,
            "tokens": options.tokens,
            **figures,
            "peak_megabytes": round(run["peak_megabytes"] * 1024**2 / 1e6),
            "ten_texts_minutes": round(figures["seconds"] * TEXTS / 60, 1),
        }
        print(json.dumps(rows[f"{shape} {options.tokens}"]), flush=True)
        save("calibration-cost", {"rows": rows})
        if shape != "smollm2" and not options.keep:
            shutil.rmtree(options.work / f"{shape}-bfloat16")


if __name__ == "__main__":
    main()
