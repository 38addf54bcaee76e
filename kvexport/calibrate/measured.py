"""The measured loss by evictions, stored in the user's cache folder in one file for each text.

An interrupted measurement continues with the first text that has no file. The folder's name contains a hash of the
checkpoint's headers, of the size and time of its files, and of the cache settings on which the loss depends. A
checkpoint that changes is therefore measured again.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.evaluate.tasks import Sample
from kvexport.export.model.cached import cache_folder, make_cache_folder
from kvexport.export.model.tensors import Checkpoint, ModelShape
from kvexport.files import json_digest, write_file
from kvexport.machine import machine_memory
from kvexport.plan.budgets import least_slots
from kvexport.recipe.fields import Recipe
from kvexport.terminal import Progress, say
from kvexport.units import format_bytes

VERSION = 1  # version of the estimate; costs of different versions are not comparable
BUDGETS = 5  # the number of measured budgets
FEWEST = 3  # least number of texts on which a build calibrates a large model
PARAMETERS = 7.5e9  # a model's parameters times texts of a build: 10 texts for 0.75B, 5 for 1.5B, 3 for 2.5B or more
SECONDS = 8e-8  # for each parameter and text, on two cores: a text takes 84 s with a model of 1.1B
SHORT = 20  # seconds; if less time is left, no line says so
# The order of texts in a build that does not read all of them: each is unlike the texts before it.
VARIED = ("prose", "python", "german", "recall/0", "chat", "tables", "french", "c++", "manual")
HINT = "--no-calibrate builds at once with equal budgets"


@dataclass(frozen=True)
class Measured:
    length: int  # number of tokens of a text to which the budgets refer
    budgets: list[list[int]]  # by layer: measured budgets, in slots of a head that sees at most `seen` tokens
    seen: list[int]  # by layer: most tokens that a head sees, `length` or fewer in a sliding window
    costs: dict[str, NDArray[np.float64]]  # by kind of text: costs [layers, heads, budgets] in nats


def budgets_of(length: int, least: float) -> list[int]:
    """Return the cache budgets to measure on a text, in slots, from 1/32 to 1/2 of its tokens in a geometric series."""
    low, high = max(length / 32, least), length / 2
    if high < 2 * low:
        raise UsageError(
            f"a text of {length} tokens is too short: a head has at least {math.ceil(least)} slots, and caches of up "
            "to half the text are compared",
            f"texts of at least {math.ceil(4 * least)} tokens: limits.max_length, or --length of kvexport calibrate",
        )
    return [math.ceil(low * (high / low) ** (i / (BUDGETS - 1)) - 1e-9) for i in range(BUDGETS)]


def folder_of(recipe: Recipe, checkpoint: Checkpoint) -> Path:
    cache, method = recipe.cache, recipe.cache.build_method()
    settings = [VERSION, repr(method), cache.sinks, cache.recent]
    return cache_folder("calibrations") / json_digest([checkpoint.facts(), settings])[:16]


def measure(
    recipe: Recipe,
    shape: ModelShape,
    samples: dict[str, Sample],
    length: int,
    progress: Callable[[str, int | None], Progress],
    *,
    all_texts: bool = True,
) -> Measured:
    """Return the loss by evictions on texts; what was measured before is read from the cache folder."""
    folder, least = folder_of(recipe, shape.checkpoint), least_slots(recipe)
    seen = [min(length, layer.sliding_window or length) for layer in shape.geometry]
    budgets = [budgets_of(tokens, least) for tokens in seen]
    number = len(samples) if all_texts else min(texts_of_build(shape), len(samples))
    if number < len(samples):
        order = sorted(samples, key=lambda kind: VARIED.index(kind) if kind in VARIED else len(VARIED))
        samples = {kind: samples[kind] for kind in order[:number]}
    files = {kind: folder / f"{_digest(sample)}.json" for kind, sample in samples.items()}
    costs = {kind: cost for kind, file in files.items() if (cost := _read(file, shape)) is not None}
    missing = [kind for kind in samples if kind not in costs]
    if missing:
        from kvexport.calibrate.head_costs import HeadCosts

        if (device := device_of(shape, length)) == "cpu":
            _require_memory(shape, length)
        measurement = HeadCosts(recipe, shape, device)
        about = duration(SECONDS * _parameters(shape) * len(missing))
        where = f"about {about} on two cores that do nothing else" if device == "cpu" else "on the GPU"
        say(f"calibrating on {len(missing)} texts, {where}, so that each KV head gets the slots it needs ({HINT})")
        start, done = time.monotonic(), 0
        try:
            with progress("calibrating", measurement.units * len(missing)) as bar:
                for done, kind in enumerate(missing):
                    if done and (seconds := (time.monotonic() - start) / done * (len(missing) - done)) > SHORT:
                        say(f"{done} of {len(missing)} texts are measured, about {duration(seconds)} left")
                    ids, counted = samples[kind].ids, samples[kind].counted
                    costs[kind] = measurement.of_text(
                        ids, counted, lambda tokens: budgets_of(tokens, least), bar.advance
                    )
                    _write(files[kind], costs[kind])
        except (KeyboardInterrupt, SystemExit):
            say(f"the costs of {len(costs)} of {len(samples)} texts are kept, and the next build measures the others")
            raise
    return Measured(length, budgets, seen, {kind: costs[kind] for kind in samples})


def texts_of_build(shape: ModelShape) -> int:
    """Return how many texts a build calibrates on. The number depends only on the model, so that equal builds agree."""
    return max(FEWEST, round(PARAMETERS / _parameters(shape)))


def _parameters(shape: ModelShape) -> int:
    return sum(p.numel() for p in shape.model.parameters())


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def device_of(shape: ModelShape, length: int) -> str:
    import torch

    fits = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= memory_of(shape, length)
    return "cuda" if fits else "cpu"


def _require_memory(shape: ModelShape, length: int) -> None:
    need, (_, available) = memory_of(shape, length), machine_memory()
    if 0 < available < need:
        raise EnvironmentProblem(
            f"the calibration takes {format_bytes(need)} of memory, and {format_bytes(available)} are free", ""
        )


def memory_of(shape: ModelShape, length: int) -> int:
    model, layers = shape.model, len(shape.geometry)
    head = model.get_output_embeddings().weight.numel()
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    rest = sum(p.numel() for p in model.parameters()) - head
    attention = max(layer.query_heads for layer in shape.geometry) * length
    layer = rest // layers + length * (24 * hidden + 3 * attention)
    inputs = layers * length * hidden
    floats: int = inputs + max(layer, head + 10 * vocabulary * length // 2)
    return 4 * floats


def _digest(sample: Sample) -> str:
    return json_digest([list(map(int, sample.ids)), list(map(int, sample.counted))])[:16]


def _read(file: Path, shape: ModelShape) -> NDArray[np.float64] | None:
    try:
        cost = np.array(json.loads(file.read_text(encoding="utf-8"))["costs"], np.float64)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    expected = (len(shape.geometry), shape.geometry[0].kv_heads, BUDGETS)
    return cost if cost.shape == expected and np.isfinite(cost).all() else None


def _write(file: Path, cost: NDArray[np.float64]) -> None:
    try:
        make_cache_folder(file.parent)
        write_file(file, json.dumps({"costs": np.vectorize(lambda x: float(f"{x:.6g}"))(cost).tolist()}))
    except OSError as error:
        raise EnvironmentProblem(
            f"{file} cannot be written: {error.strerror or error}", "free some space there, or XDG_CACHE_HOME=DIR"
        ) from error
