"""KL of quantized caches with as many bytes as a float16 cache, with and without measured budgets of layers or heads.

    python benchmarks/quality/quantized_budgets.py [--budgets 1/20,1/8,1/4] [--samples 8]
        [--only keepkv,ballot,listed,heads] [--dtypes int8,k8v4]

The deployed engine of SmolLM2-135M-Instruct is compared with the full cache. The texts and the settings are those of
docs/measurements/budgets.md (sweep.py, recipes smollm2-135m-base, -listed and -heads). The figures of that page are the
rows of float16, for which a float32 cache stands. A quantized cache gets the most slots whose bytes, with scales,
votes, scores, positions and slack, do not exceed those of keepkv's float16 cache at that budget. Rows that
benchmarks/results/quantized-budgets.json already holds are not measured again.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import TEST_RECIPES, earlier, options_of, save
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.result import KL, Options
from kvexport.evaluate.runner import Run, alone
from kvexport.evaluate.settings import Setting, load_setting, parse_budgets
from kvexport.plan.planner import plan_cache
from kvexport.recipe.load import load_recipe
from kvexport.terminal import silent

NAME, RECIPE = "quantized-budgets", "smollm2-135m-base"
MEASURED = {"listed": str(TEST_RECIPES / "smollm2-135m-listed.yaml"), "heads": "smollm2-135m-heads"}
LENGTH = 1024
SETTINGS = ["backend.threads=1", "export.prefill_chunk=32", "cache.merge_every=8"]  # as in docs/measurements/budgets.md


def label_of(name: str, dtype: str) -> str:
    """Return the settings of a method, as `kvexport eval` takes them."""
    label = "ballot" if name in MEASURED else name
    if name in MEASURED:
        shares = load_recipe(MEASURED[name]).recipe.cache.allocation.shares
        label += f":cache.allocation.kind=listed:cache.allocation.shares={shares}"
    return f"{label}:cache.dtype={dtype}"


def setting_of(run: Run, name: str, dtype: str, budget: float) -> Setting:
    """Return the setting with the most slots that fit."""
    slots = round(budget * LENGTH)
    float16 = load_setting(RECIPE, "keepkv:model.dtype=float16", slots, run.common)
    limit = plan_cache(float16, run.geometry).bytes()

    def bytes_of(n: int) -> int:
        return plan_cache(load_setting(RECIPE, label_of(name, dtype), n, run.common), run.geometry).bytes()

    counts = range(slots // 2, 4 * slots)
    fits = counts[bisect_right(counts, limit, key=bytes_of) - 1]
    recipe = load_setting(RECIPE, label_of(name, dtype), fits, run.common)
    return Setting(f"{name}:{dtype}", budget, fits, plan_cache(recipe, run.geometry).bytes(), recipe)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--budgets", default="1/20,1/8,1/4")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--only", default="keepkv,ballot,listed,heads")
    parser.add_argument("--dtypes", default="int8,k8v4")
    parser.add_argument("--work", type=Path, metavar="DIR", help="the folder for the full cache's predictions")
    arguments = parser.parse_args()
    options = Options((), (), ("text",), arguments.samples, LENGTH, batch=2, source=manual())
    rows: dict[str, Any] = earlier(NAME).get("rows", {})
    with ExitStack() as stack:
        folder = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone(folder))
        run = Run(RECIPE, SETTINGS, options, folder, silent)
        run.full()
        for budget in parse_budgets(arguments.budgets):
            for method in arguments.only.split(","):
                for dtype in arguments.dtypes.split(","):
                    key = f"{method} {dtype} {budget:g}"
                    if len(rows.get(key, {"kl": ()})["kl"]) >= arguments.samples:
                        continue
                    setting = setting_of(run, method, dtype, budget)
                    kl = run.measure(setting).scores["text"].samples[KL]
                    row = {"method": method, "dtype": dtype, "budget": budget, "slots": setting.slots}
                    rows[key] = row | {"bytes": setting.bytes, "kl": [float(f"{x:.6g}") for x in kl]}
                    print(f"{budget:g} {method} {dtype} {setting.slots} slots: {sum(kl) / len(kl):.4f}", flush=True)
                    save(NAME, {"length": LENGTH, "settings": SETTINGS, "rows": rows})


if __name__ == "__main__":
    main()
