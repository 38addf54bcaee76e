"""The options and results of an evaluation of compressed KV caches."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from kvexport.errors import UsageError
from kvexport.evaluate.measure import Outcome
from kvexport.evaluate.statistics import Estimate, mean, share
from kvexport.evaluate.suites import Item
from kvexport.evaluate.tasks import TASKS, Sample
from kvexport.files import json_digest, write_file

KL, ACCURACY = "kl", "accuracy"


@dataclass(frozen=True)
class Options:
    # Labels of methods such as "keepkv:threshold=0.7"; () for streaming, h2o and the recipe's own method
    methods: tuple[str, ...] = ()
    budgets: tuple[float, ...] = (0.125, 0.25, 0.5)  # shares of `length`, or numbers of slots
    tasks: tuple[str, ...] = tuple(TASKS)
    samples: int = 40  # number of samples for each task and length
    # Tokens of a prompt; None for half of the recipe's limits.max_length, or for all of it with benchmark suites
    length: int | None = None
    seed: int = 0
    batch: int = 8
    source: str | None = None  # text that samples are made from
    suites: dict[str, list[Item]] = field(default_factory=dict)  # items of RULER, by task
    # The label of the method with which paired differences compare the others; None for the recipe's own method, or for
    # the last label if the recipe's method is not compared
    against: str | None = None


@dataclass(frozen=True)
class Cell:
    """The number of right answers among the evaluation samples of one length and depth (the place of the fact)."""

    length: int
    depth: float
    right: int
    samples: int


@dataclass(frozen=True)
class Score:
    task: str
    # Share of samples whose whole answer is right (for a suite, the suite's score from 0 to 1); None for text
    accuracy: Estimate | None = None
    nll: Estimate | None = None  # mean -ln p of evaluated tokens, in nats per token; None if not measured
    # KL(full || setting) in nats per position: the mean over samples, and the 99th percentile over positions
    kl: Estimate | None = None
    kl_99: float | None = None
    agreement: float | None = None  # share of positions whose most likely token equals the full cache's
    cells: tuple[Cell, ...] = ()
    # "accuracy" (1 for right), "nll" and "kl" of every sample, in an order that all settings share
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class Result:
    """Everything that an evaluation measured for one compression setting (method and budget)."""

    label: str
    budget: float | None  # budget as the user wrote it; None for the full cache
    slots: int
    bytes: int  # bytes of the whole state of one sequence
    scores: dict[str, Score] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A paired difference of two methods at the same budget: the mean of the samples' differences.

    The samples' figure is "kl" or "accuracy". The interval of the mean difference is narrower than the intervals of the
    two methods' own figures suggest, because both methods ran on the same samples.
    """

    label: str
    budget: float
    against: str
    task: str
    figure: str
    difference: Estimate


@dataclass
class Evaluation:
    recipe: str
    length: int
    seed: int
    samples: int
    full: Result  # result of the full cache; its bytes are those of `length` tokens
    results: list[Result]
    tasks: list[str]  # tasks that the user chose
    against: str = ""
    differences: list[Difference] = field(default_factory=list)  # paired differences of all other methods to `against`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def paired(results: Sequence[Result], against: str) -> list[Difference]:
    """Return every method's figures minus those of the method `against` at the same budget, as paired differences.

    There is a difference for every task and figure that both methods have.
    """
    differences = []
    bases = {result.budget: result for result in results if result.label == against}
    for result in results:
        base = bases.get(result.budget)
        if base is None or result is base or result.budget is None:
            continue
        for task, score in result.scores.items():
            for figure in (KL, ACCURACY):
                own_values, base_values = score.samples.get(figure), base.scores[task].samples.get(figure)
                if own_values and base_values:
                    estimate = mean([x - y for x, y in zip(own_values, base_values, strict=True)])
                    differences.append(Difference(result.label, result.budget, against, task, figure, estimate))
    return differences


def line(result: Result) -> str:
    figures = []
    for task, score in result.scores.items():
        right = f" {score.accuracy.value:.3g} right" if score.accuracy else ""
        kl = f" KL {score.kl}" if score.kl else ""
        loss = f" loss {score.nll}" if score.nll and not right and not kl else ""
        figures.append(f"{task}{right}{kl}{loss}")
    return f"{named(result)}: {', '.join(figures)}"


def named(result: Result) -> str:
    return result.label if result.budget is None else f"{result.label}, {result.slots} slots"


def score_of(task: str, samples: Sequence[Sample], outcomes: Sequence[Outcome], compared: bool) -> Score:
    every: dict[str, tuple[float, ...]] = {"nll": tuple(o.nll for o in outcomes)}
    score = Score(task, nll=mean(every["nll"]), samples=every)
    if TASKS[task].exact:
        every[ACCURACY] = tuple(float(o.right) for o in outcomes)
        keys = [(int(s.cell["length"]), s.cell.get("depth", math.nan)) for s in samples]
        answers: dict[tuple[int, float], list[bool]] = {}
        for key, outcome in zip(keys, outcomes, strict=True):
            answers.setdefault(key, []).append(outcome.right)
        cells = (
            tuple(Cell(*key, sum(hits), len(hits)) for key, hits in sorted(answers.items()))
            if TASKS[task].depths != (0.5,)
            else ()
        )
        score = replace(score, accuracy=share(sum(o.right for o in outcomes), len(outcomes)), cells=cells)
    if not compared:
        return score
    every[KL] = tuple(float(o.kl.mean()) for o in outcomes)
    positions = np.concatenate([o.kl for o in outcomes])
    agreement = float(np.concatenate([o.agrees for o in outcomes]).mean())
    return replace(score, kl=mean(every[KL]), kl_99=float(np.quantile(positions, 0.99)), agreement=agreement)


def read_result(path: Path, key: str) -> Result | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = content["sha256"] == json_digest([content["key"], content["result"]])
        result = TypeAdapter(Result).validate_python(content["result"]) if whole else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UsageError(
            f"{path} is damaged: its digest does not match",
            f"rm {shlex.quote(str(path))}, and the setting is measured again",
        )
    return result if content["key"] == key else None


def write_result(path: Path, key: str, result: Result) -> None:
    values = json.loads(json.dumps(asdict(result)))  # tuples become lists, as in the file
    write_file(path, json.dumps({"key": key, "sha256": json_digest([key, values]), "result": values}, indent=1))
