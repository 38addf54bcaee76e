"""The options and results of an evaluation of compressed KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvexport.evaluate.measure import Outcome
from kvexport.evaluate.statistics import Estimate, mean
from kvexport.evaluate.suites import Item
from kvexport.evaluate.tasks import TASKS

KL, ACCURACY = "kl", "accuracy"


@dataclass(frozen=True)
class Options:
    # Labels of methods such as "keepkv:threshold=0.7"; () for streaming, h2o and the recipe's own method
    methods: tuple[str, ...] = ()
    budgets: tuple[float, ...] = (0.125, 0.25, 0.5)  # shares of `length`, or numbers of slots
    tasks: tuple[str, ...] = tuple(TASKS)
    samples: int = 40  # number of samples for each task
    # Tokens of a prompt; None for half of the recipe's limits.max_length, or for all of it with benchmark suites
    length: int | None = None
    seed: int = 0
    batch: int = 8
    source: str | None = None  # text that samples are made from
    suites: dict[str, list[Item]] = field(default_factory=dict)  # items of RULER, by task


@dataclass(frozen=True)
class Score:
    task: str
    accuracy: Estimate | None = None  # mean score of a suite, from 0 to 1; None for text
    nll: Estimate | None = None  # mean -ln p of evaluated tokens, in nats per token; None if not measured
    # KL(full || setting) in nats per position: the mean over samples, and the 99th percentile over positions
    kl: Estimate | None = None
    kl_99: float | None = None
    agreement: float | None = None  # share of positions whose most likely token equals the full cache's
    # "accuracy", "nll" and "kl" of every sample, in an order that all settings share
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class Result:
    """Everything that an evaluation measured for one compression setting (method and budget)."""

    label: str
    budget: float | None  # budget as the user wrote it; None for the full cache
    slots: int
    bytes: int  # bytes of the whole state of one sequence
    scores: dict[str, Score] = field(default_factory=dict)


@dataclass
class Evaluation:
    recipe: str
    length: int
    seed: int
    samples: int
    full: Result  # result of the full cache; its bytes are those of `length` tokens
    results: list[Result]
    tasks: list[str]  # tasks that the user chose

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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


def score_of(task: str, outcomes: Sequence[Outcome], compared: bool) -> Score:
    every: dict[str, tuple[float, ...]] = {"nll": tuple(o.nll for o in outcomes)}
    score = Score(task, nll=mean(every["nll"]), samples=every)
    if not compared:
        return score
    every[KL] = tuple(float(o.kl.mean()) for o in outcomes)
    positions = np.concatenate([o.kl for o in outcomes])
    agreement = float(np.concatenate([o.agrees for o in outcomes]).mean())
    return replace(score, kl=mean(every[KL]), kl_99=float(np.quantile(positions, 0.99)), agreement=agreement)
