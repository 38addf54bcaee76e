"""Does every method's engine of a real checkpoint pass `kvexport validate`, in float32 and in float16, and how long
does it take?

    python benchmarks/validate.py [--recipe smollm2-135m-base] [--set KEY=VALUE ...] [--methods NAME ...]

Writes benchmarks/results/validate-RECIPE.json, engine by engine; those that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, save

from kvexport.export.build import build
from kvexport.methods import all_methods
from kvexport.recipe.load import load_recipe
from kvexport.terminal import show
from kvexport.validate.result import ValidationResult
from kvexport.validate.runner import validate_artifact

DTYPES = ("float32", "float16")


def row(result: ValidationResult) -> dict[str, Any]:
    """A validation in figures."""
    kinds = dict.fromkeys(kind for step in result.steps for kind in step["largest"])
    return {
        "passed": result.passed,
        "problems": result.problems,
        "seconds": round(result.seconds, 1),
        "tokens": result.tokens,
        "texts": result.texts,
        "calls": len(result.steps),
        "flips": result.flips,
        "head_merges": result.head_merges,
        "largest": {kind: result.largest(kind) for kind in kinds},
        "rounding": [
            {"phase": r.phase, "vectors": r.tensor, "engine": vars(r.engine), "pytorch": vars(r.pytorch)}
            for r in result.rounding
        ],
        "own_kl": result.own_kl,
        "kl": {kind: result.mean_kl(kind) for kind in dict.fromkeys(result.texts)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-135m-base")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--methods", nargs="*", metavar="NAME", default=sorted(all_methods()))
    parser.add_argument("--batch", type=int)
    asked = parser.parse_args()
    name = f"validate-{Path(asked.recipe).stem}"
    path = RESULTS / f"{name}.json"
    done = json.loads(path.read_text())["engines"] if path.exists() else {}
    for method in asked.methods:
        for dtype in DTYPES:
            if f"{method} {dtype}" in done:
                continue
            changes = [f"cache.method={method}", f"model.dtype={dtype}", *asked.set]
            with tempfile.TemporaryDirectory() as folder:
                artifact = build(load_recipe(asked.recipe, changes).recipe, Path(folder) / "artifact", name=method)
                result = validate_artifact(artifact, batch=asked.batch, progress=show)
            done[f"{method} {dtype}"] = row(result)
            print(
                f"{method} {dtype}: {'passed' if result.passed else result.problems}, {result.seconds:.0f} s",
                flush=True,
            )
            save(name, {"recipe": asked.recipe, "set": asked.set, "engines": done})


if __name__ == "__main__":
    main()
