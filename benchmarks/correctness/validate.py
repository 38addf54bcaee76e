"""`kvexport validate` on an engine of every method of a real checkpoint, in float32 and float16, with its time.

    python benchmarks/correctness/validate.py [--recipe smollm2-135m-base] [--set KEY=VALUE ...] [--methods NAME ...]
    python benchmarks/correctness/validate.py --shipped

Writes benchmarks/results/validate-RECIPE.json, engine by engine, each with its settings. Engines that the file already
holds with the same settings are not run again. With `--shipped`, the script validates the shipped recipes of SmolLM2
and of the tiny models instead, with the defaults of `kvexport validate`, and writes
benchmarks/results/validate-recipes.json. Every engine is built in one process and validated in another one, whose peak
memory is recorded.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, earlier, options_of, save
from kvexport.export.build import build
from kvexport.methods import all_methods
from kvexport.recipe.load import load_recipe
from kvexport.terminal import show
from kvexport.validate.result import ValidationResult
from kvexport.validate.runner import validate_artifact

DTYPES = ("float32", "float16")
SHIPPED = ("smollm2-135m-*.yaml", "tiny-*.yaml")


def row(result: ValidationResult) -> dict[str, Any]:
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
        "own_kl": result.own_kl,
        "kl": {kind: result.mean_kl(kind) for kind in dict.fromkeys(result.texts)},
    }


def build_artifact(recipe: str, changes: list[str], folder: Path) -> Path:
    return build(load_recipe(recipe, changes).recipe, folder / "artifact", name=Path(recipe).stem)


def validate(artifact: Path, batch: int | None) -> dict[str, Any]:
    """Validate an engine, and return the figures and the peak memory of this process."""
    figures = row(validate_artifact(artifact, batch=batch, progress=show))
    return {**figures, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def built_and_validated(recipe: str, changes: list[str], batch: int | None) -> dict[str, Any]:
    """Build an engine, validate it, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = in_own_process(build_artifact, recipe, changes, Path(folder))
        figures: dict[str, Any] = in_own_process(validate, artifact, batch)
    verdict = "passed" if figures["passed"] else figures["problems"]
    name = " ".join([recipe, *changes])
    print(f"{name}: {verdict}, {figures['seconds']:.0f} s, {figures['peak_mb']} MB", flush=True)
    return figures


def validate_shipped() -> None:
    """Build and validate each recipe of SHIPPED with the defaults of `kvexport validate`."""
    done = {}
    for recipe in sorted(path.stem for pattern in SHIPPED for path in (ROOT / "recipes").glob(pattern)):
        done[recipe] = built_and_validated(recipe, [], None)
        save("validate-recipes", {"recipes": done})


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--recipe", default="smollm2-135m-base")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--methods", nargs="*", metavar="NAME", default=sorted(all_methods()))
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--shipped", action="store_true")
    arguments = parser.parse_args()
    if arguments.shipped:
        validate_shipped()
        return
    name = f"validate-{Path(arguments.recipe).stem}"
    done = earlier(name).get("engines", {})
    settings = {"set": arguments.set, "batch": arguments.batch}
    for method in arguments.methods:
        for dtype in arguments.dtypes:
            engine = f"{method} {dtype}"
            if engine in done and {key: done[engine].get(key) for key in settings} == settings:
                continue
            changes = [f"cache.method={method}", f"model.dtype={dtype}", *arguments.set]
            done[engine] = {**settings, **built_and_validated(arguments.recipe, changes, arguments.batch)}
            save(name, {"recipe": arguments.recipe, "engines": done})


if __name__ == "__main__":
    main()
