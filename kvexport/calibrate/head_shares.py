"""`kvexport calibrate`: cache budgets of KV heads by the loss that evictions from each head cause."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.calibrate.allotment import relative_cost, robust_budgets
from kvexport.calibrate.facts import fact_samples, language_of_folder
from kvexport.calibrate.measured import Measured, budgets_of, measure
from kvexport.calibrate.texts import LENGTH, read_kinds, tokenized
from kvexport.errors import UsageError
from kvexport.evaluate.language import Words
from kvexport.evaluate.tasks import Sample, text
from kvexport.plan.budgets import least_slots
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.report import KeyValues, Section, Table
from kvexport.terminal import Progress, silent

PASSAGES = 2  # passages with facts


@dataclass(frozen=True)
class HeadShares:
    recipe: str
    length: int  # largest number of tokens of a text
    texts: dict[str, int]  # number of texts of each task; every kind of text is a task
    budgets: list[int]  # budgets for which costs were measured, in slots of a head
    costs: dict[str, list[list[list[float]]]]  # by task, layer, KV head and budget: cost in nats, mean over texts
    changes: dict[str, float]  # by task: estimated cost with these shares, relative to that with equal budgets
    shrink: float  # share of the budget that is divided equally among all heads
    shares: list[list[float]]  # shares of the budget by layer and KV head, relative to their mean

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "setting": f"cache.allocation.shares={self.shares}"}

    def sections(self) -> list[Section]:
        cost = np.mean([np.array(costs) for costs in self.costs.values()], 0)
        rows: list[Sequence[str | int | float]] = [
            (layer, head, *(f"{x:.3g}" for x in cost[layer, head]), share)
            for layer, shares in enumerate(self.shares)
            for head, share in enumerate(shares)
        ]
        kinds = [(task, self.texts[task], f"{100 * (change - 1):+.0f} %") for task, change in self.changes.items()]
        shown = Table(
            "Texts",
            ("task", "texts", "change"),
            kinds,
            "The change of the estimated loss of evictions, against equal budgets of the same slots. "
            f"All heads share {100 * self.shrink:.0f} % of the slots equally, because texts disagree.",
        )
        note = "Loss in nats if that head alone has this many slots, to second order; the mean over tasks."
        heads = ("layer", "KV head", *(f"{n} slots" for n in self.budgets), "share")
        summary: dict[str, str] = {
            "recipe": self.recipe,
            "texts": f"{sum(self.texts.values())} of {self.length} tokens",
            "write": f"cache: {{allocation: {{kind: listed, shares: {self.shares}}}}}",
            "or": f"--set cache.allocation.kind=listed --set cache.allocation.shares={self.shares}",
        }
        return [KeyValues("Calibration", summary), shown, Table("Cost of evictions", heads, rows, note)]


def calibrate_heads(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    length: int | None = None,
    texts: Path | None = None,
    progress: Callable[[str, int | None], Progress] = silent,
) -> HeadShares:
    from kvexport.export.build import read_model

    own = load_recipe(recipe, overrides)
    _require_budgets(own.recipe)
    with progress("reading the checkpoint", None):
        shape = read_model(own.recipe)
    length = length or min(LENGTH, own.recipe.limits.max_length)
    slots = fitted_slots(own.recipe, length)
    samples = samples_of(shape.checkpoint.path, length, texts)
    measured = grouped(measure(own.recipe, shape, samples, length, progress))
    shares, shrink = head_shares_of(measured, slots, least_slots(own.recipe))
    budgets = np.round(np.array(shares).reshape(-1) * slots).astype(np.int64)
    least = math.ceil(least_slots(own.recipe))
    rows = rows_of(measured)
    changes = {
        task: relative_cost(cost.reshape(-1, cost.shape[-1]), *rows, budgets, slots, least)
        for task, cost in measured.costs.items()
    }
    counts = {task: sum(name.partition("/")[0] == task for name in samples) for task in measured.costs}
    nats = {task: np.vectorize(lambda x: float(f"{x:.4g}"))(each).tolist() for task, each in measured.costs.items()}
    sizes = budgets_of(length, least_slots(own.recipe))
    return HeadShares(own.name, length, counts, sizes, nats, changes, shrink, shares)


def _require_budgets(recipe: Recipe) -> None:
    if not recipe.cache.build_method().compresses:
        problem = f"this recipe's cache evicts nothing (method {recipe.cache.method}), in no layer"
        raise UsageError(problem, "--set cache.method=ballot, or what you want to build")
    if recipe.cache.positions == "cache":
        problem = "cache.positions is cache, where all layers hold the same number of entries"
        raise UsageError(problem, "--set cache.positions=absolute")


def samples_of(checkpoint: Path, length: int, texts: Path | None = None) -> dict[str, Sample]:
    language = language_of_folder(checkpoint)
    samples: dict[str, Sample] = {}
    if texts is None and isinstance(language, Words):  # the tiny checkpoint knows the words of its own language alone
        for i in range(PASSAGES):
            samples[f"text/{i}"] = text(language, np.random.default_rng([0, i]), length)
    else:
        for kind, ids in tokenized(checkpoint, read_kinds(texts), length).items():
            samples[kind] = Sample(ids, len(ids) // 2, list(range(len(ids) // 2, len(ids) - 1)))
    facts = fact_samples(checkpoint, length * 7 // 8, PASSAGES)
    return samples | {f"recall/{i}": sample for i, sample in enumerate(facts)}


def fitted_slots(recipe: Recipe, length: int) -> int:
    """Return the mean slots per KV head for which shares are found: the recipe's, or fewer than a text has tokens."""
    least = math.ceil(least_slots(recipe))
    if recipe.budget <= least:
        raise UsageError(
            f"{recipe.budget} slots leave no choice: sinks, recent slots and two more take {least} of each head",
            f"--budget {2 * least}, or more",
        )
    part = max(length // 4, round(recipe.budget / recipe.limits.max_length * length))
    return max(min(recipe.budget, part, length // 2), least + 1)


def grouped(measured: Measured) -> Measured:
    groups: dict[str, list[NDArray[np.float64]]] = {}
    for name, cost in measured.costs.items():
        groups.setdefault(name.partition("/")[0], []).append(cost)
    means = {task: np.mean(costs, 0) for task, costs in groups.items()}
    return replace(measured, costs=means)


def head_shares_of(measured: Measured, slots: int, least: float) -> tuple[list[list[float]], float]:
    """Return each KV head's share of the slots [layers, heads], relative to the mean, and the shrinkage."""
    costs = {task: cost.reshape(-1, cost.shape[-1]) for task, cost in measured.costs.items()}
    shape = next(iter(measured.costs.values())).shape[:2]
    budgets, shrink = robust_budgets(costs, *rows_of(measured), slots, math.ceil(least))
    return (budgets / slots).round(2).reshape(shape).tolist(), shrink


def rows_of(measured: Measured) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for n KV heads, the budgets [n, budgets] at which costs were measured, and each head's most slots [n]."""
    heads = next(iter(measured.costs.values())).shape[1]
    return np.repeat(np.array(measured.budgets), heads, 0), np.repeat(np.array(measured.seen), heads)
