"""What was asked of an evaluation, and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvexport.evaluate.measure import Window
from kvexport.evaluate.statistics import Estimate, mean
from kvexport.evaluate.suites import Item
from kvexport.evaluate.tasks import TASKS
from kvexport.validate.perturbation import Perturbation

STABILITY = "stability"
ALL_TASKS = (*TASKS, STABILITY)
KL, ACCURACY = "kl", "accuracy"


@dataclass(frozen=True)
class Options:
    """What `kvexport eval` was asked. methods: labels ("keepkv:threshold=0.7"), () takes streaming, h2o and the
    recipe's own. budgets: shares of `length`, or slots. length: tokens of a prompt, None takes half of the recipe's
    limits.max_length (all of it with suites). samples: per task and length. training_length: None takes the model's
    maximum of positions. source: text to measure on. suites: items of LongBench or RULER by data set. telemetry: note
    what every merge does to the attention output, on one batch of the text (or of the first task that is asked).
    against: the label that the others' paired differences are to; None takes the recipe's own method, or where it is
    not compared the last one. timed: measure the time of a decode step."""

    methods: tuple[str, ...] = ()
    budgets: tuple[float, ...] = (0.125, 0.25, 0.5)
    tasks: tuple[str, ...] = ALL_TASKS
    samples: int = 40
    length: int | None = None
    seed: int = 0
    batch: int = 8
    training_length: int | None = None
    source: str | None = None
    suites: dict[str, list[Item]] = field(default_factory=dict)
    telemetry: bool = False
    against: str | None = None
    timed: bool = True


@dataclass(frozen=True)
class Cell:
    """Right answers among the samples of one length and depth."""

    length: int
    depth: float
    right: int
    samples: int


@dataclass(frozen=True)
class Score:
    """A setting on a task. accuracy: samples answered wholly right (of a suite: its own score, 0 to 1); None for a
    text. nll: -ln p of what counts, nats per token. kl: KL(full || setting), nats per position, mean over samples, and
    its 99th percentile over positions. agreement: positions whose likeliest token is the full cache's. None where there
    is nothing of the kind. samples: every sample's "accuracy" (1: right), "nll" and "kl", in the order of the samples,
    which is the same for all settings."""

    task: str
    accuracy: Estimate | None = None
    nll: Estimate | None = None
    kl: Estimate | None = None
    kl_99: float | None = None
    agreement: float | None = None
    cells: tuple[Cell, ...] = ()
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class Result:
    """All that was measured of a setting. budget: as asked for, None for the full cache. bytes: of one sequence's whole
    state. step_seconds: one decode step of one sequence at the run's length, None where it was not measured. windows:
    of the stability run, where it was made. telemetry: where it was asked for; None of the full cache."""

    label: str
    budget: float | None
    slots: int
    bytes: int
    step_seconds: float | None
    scores: dict[str, Score] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    telemetry: list[Perturbation] | None = None


@dataclass(frozen=True)
class Difference:
    """A label's figure ("kl", "accuracy") minus that of the label `against` at the same budget, sample by sample: the
    mean and its interval, which is narrower than those of the two figures say, since both saw the same samples."""

    label: str
    budget: float
    against: str
    task: str
    figure: str
    difference: Estimate


@dataclass
class Evaluation:
    """The full cache (its bytes are those of `length` tokens) and every method at every budget. tasks: what was asked.
    skipped: task -> why it could not be. differences: of all other labels to `against`."""

    recipe: str
    length: int
    seed: int
    samples: int
    training_length: int
    full: Result
    results: list[Result]
    tasks: list[str]
    skipped: dict[str, str]
    against: str = ""
    differences: list[Difference] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self)


def paired(results: Sequence[Result], against: str) -> list[Difference]:
    """Every result to that of the label `against` at its budget, on every task and figure that both have."""
    found = []
    bases = {result.budget: result for result in results if result.label == against}
    for result in results:
        base = bases.get(result.budget)
        if base is None or result is base or result.budget is None:
            continue
        for task, score in result.scores.items():
            for figure in (KL, ACCURACY):
                here, there = score.samples.get(figure), base.scores[task].samples.get(figure)
                if here and there:
                    estimate = mean([x - y for x, y in zip(here, there, strict=True)])
                    found.append(Difference(result.label, result.budget, against, task, figure, estimate))
    return found


def line(result: Result) -> str:
    """A result in a line."""
    figures = []
    for task, score in result.scores.items():
        right = f" {score.accuracy.value:.3g} right" if score.accuracy else ""
        kl = f" KL {score.kl}" if score.kl else ""
        loss = f" loss {score.nll}" if score.nll and not right and not kl else ""
        figures.append(f"{task}{right}{kl}{loss}")
    return f"{named(result)}: {', '.join(figures)}"


def named(result: Result) -> str:
    """A result's setting for people."""
    return result.label if result.budget is None else f"{result.label}, {result.slots} slots"
