"""Recall of the tiny trained model by method, with 4, 16 and 64 facts and budgets of 1/8, 1/4 and 1/2 of the prompt.

    python benchmarks/recall.py [--prompts 100] [--length 512]

Every engine is built and run as a user would. All methods get the same prompts. The interval is Wilson's at 95 %.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from common import save

import kvexport
from kvexport.evaluate.language import tiny_language
from kvexport.evaluate.statistics import share
from kvexport.recipe.load import load_recipe

METHODS: dict[str, list[str]] = {
    "full": [],
    "streaming": [],
    "h2o": [],
    "keepkv": [],
    "keepkv evict-first": ["cache.parameters.order=evict-first"],
    "keepkv T=0.7": ["cache.parameters.threshold=0.7"],
}
BATCH = 20


def measure(engine: kvexport.Engine, length: int, facts: int, prompts: int) -> int:
    """Return the number of questions, out of `prompts`, with the right first token."""
    language, rng, hits = tiny_language(), np.random.default_rng(facts), 0
    cases = [language.make_prompt(rng, length, facts) for _ in range(prompts)]
    for start in range(0, prompts, BATCH):
        batch = cases[start : start + BATCH]
        logits = engine.lanes(len(batch)).prefill([np.array(ids) for ids, _ in batch])
        hits += int((logits.argmax(1) == [answer for _, answer in batch]).sum())
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in METHODS.items():
            for divisor in (8, 4, 2):
                if name == "full" and divisor != 8:
                    continue
                budget = options.length // divisor
                settings = [
                    f"cache.method={name.split()[0]}",
                    f"cache.budget={budget}",
                    f"limits.max_batch={BATCH}",
                    *overrides,
                ]
                loaded = load_recipe("tiny-base", settings)
                engine = kvexport.load(kvexport.build(loaded.recipe, Path(folder) / f"{len(rows)}"))
                for facts in (4, 16, 64):
                    hits = measure(engine, options.length, facts, options.prompts)
                    estimate = share(hits, options.prompts)
                    rows.append(
                        {
                            "method": name,
                            "budget": None if name == "full" else budget,
                            "facts": facts,
                            "recall": estimate.value,
                            "ci": [estimate.low, estimate.high],
                        }
                    )
                    print(
                        f"{name:20} budget {'full' if name == 'full' else budget:>5} facts {facts:3}: {estimate}",
                        flush=True,
                    )
    print(save("recall", {"length": options.length, "prompts": options.prompts, "rows": rows}))


if __name__ == "__main__":
    main()
