"""`kvexport eval`: methods at equal bytes on the same samples, each on the engine it would be deployed on."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.cache import plan_cache
from kvexport.errors import UsageError
from kvexport.evaluate.language import language_of
from kvexport.evaluate.measure import Outcome, Rows, Window, run_long, run_samples, step_seconds
from kvexport.evaluate.settings import FULL, Setting, equal_bytes, load_setting, longer_checkpoint
from kvexport.evaluate.statistics import Estimate, mean, share
from kvexport.evaluate.suites import Item, run_items
from kvexport.evaluate.tasks import TASKS, Sample, long_text
from kvexport.recipe.fields import Recipe
from kvexport.runtime.engine import Engine, load
from kvexport.runtime.text import FILE_NAME, Tokenizer
from kvexport.terminal import Progress, silent
from kvexport.validate.perturbation import Perturbation

STABILITY = "stability"
TIMES = 20  # training lengths that `stability` runs
TIMED = 96  # room for the decode steps that are timed
ALL_TASKS = (*TASKS, STABILITY)
Show = Callable[[str, int | None], Progress]


@dataclass(frozen=True)
class Options:
    """What `kvexport eval` was asked. methods: labels ("keepkv:threshold=0.7"), () takes streaming, h2o and the
    recipe's own. budgets: shares of `length`, or slots. length: tokens of a prompt, None takes half of the recipe's
    limits.max_length (all of it with suites). samples: per task and length. training_length: None takes the model's
    maximum of positions. source: text to measure on. suites: items of LongBench or RULER by data set. telemetry: note
    what every merge does to the attention output, on one batch of the text (or of the first task that is asked)."""

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
    is nothing of the kind."""

    task: str
    accuracy: Estimate | None = None
    nll: Estimate | None = None
    kl: Estimate | None = None
    kl_99: float | None = None
    agreement: float | None = None
    cells: tuple[Cell, ...] = ()


@dataclass
class Result:
    """All that was measured of a setting. budget: as asked for, None for the full cache. bytes: of one sequence's whole
    state. step_seconds: one decode step of one sequence at the run's length. windows: of the stability run, where it
    was made. telemetry: where it was asked for; None of the full cache."""

    label: str
    budget: float | None
    slots: int
    bytes: int
    step_seconds: float
    scores: dict[str, Score] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    telemetry: list[Perturbation] | None = None


@dataclass
class Evaluation:
    """The full cache (its bytes are those of `length` tokens) and every method at every budget. tasks: what was asked.
    skipped: task -> why it could not be."""

    recipe: str
    length: int
    seed: int
    samples: int
    training_length: int
    full: Result
    results: list[Result]
    tasks: list[str]
    skipped: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self)


def evaluate(
    recipe: str, overrides: Sequence[str], options: Options, work: Path | None = None, progress: Show = silent
) -> Evaluation:
    """Build and measure every setting of a recipe (its name or file, with `--set` overrides).

    work: where the artifacts are built and stay; None: a temporary folder. Raises UsageError for unknown tasks and
    methods, budgets that cannot hold sinks and recent slots, and tasks that do not fit the length or the model.
    """
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvexport-eval-")))
        folder.mkdir(parents=True, exist_ok=True)
        return Run(recipe, list(overrides), options, folder, progress).all()


class Run:
    """One evaluation on its way: what all settings share. settings: those to be measured, by budget; the full cache
    comes first."""

    def __init__(self, recipe: str, overrides: list[str], options: Options, folder: Path, progress: Show) -> None:
        from kvexport.export.build import read_model
        from kvexport.recipe.load import load_recipe

        self.recipe, self.options, self.folder, self.progress = recipe, options, folder, progress
        if unknown := [name for name in options.tasks if name not in ALL_TASKS]:
            raise UsageError(f"unknown task {unknown[0]!r}", f"--tasks {','.join(ALL_TASKS)}")
        own = load_recipe(recipe, overrides).recipe
        limit = own.limits.max_length
        self.length = options.length or (limit if options.suites else limit // 2)
        with progress("reading the checkpoint", None):
            shape = read_model(own)
        self.checkpoint: Path = shape.checkpoint.path
        positions = getattr(shape.model.config.get_text_config(), "max_position_embeddings", self.length)
        self.training_length = options.training_length or int(positions)
        tokenizer = Tokenizer.from_folder(self.checkpoint) if (self.checkpoint / FILE_NAME).exists() else None
        self.language = language_of(tokenizer, options.source)
        self.skipped = {
            task: "this model's language cannot ask it" for task in options.tasks if task in self.language.lacks
        }
        self.samples = self._samples()
        if options.telemetry and not self.samples:
            raise UsageError("telemetry is taken on the samples of a task, and none is asked", "--tasks text")
        longest = max([len(s.ids) for samples in self.samples.values() for s in samples], default=0)
        longest = max(longest, limit if options.suites else 0, self.length + TIMED)
        # Settings that every engine of this run shares.
        self.common = [
            *overrides,
            "export.logits=all",
            f"limits.max_batch={options.batch}",
            f"limits.max_length={longest}",
        ]
        labels = options.methods or tuple(dict.fromkeys(("streaming", "h2o", own.cache.method)))
        bounded = list(dict.fromkeys(label for label in labels if label != FULL))
        self.geometry = shape.geometry
        self.settings = equal_bytes(recipe, bounded, options.budgets, self.length, self.geometry, self.common)
        self.references: dict[str, list[Rows]] = {}

    def _samples(self) -> dict[str, list[Sample]]:
        made = {}
        for name in self.options.tasks:
            if name in TASKS and name not in self.skipped:
                try:
                    made[name] = TASKS[name].samples(
                        self.language, self.options.samples, self.length, self.options.seed
                    )
                except ValueError as error:
                    raise UsageError(
                        f"the task {name} at a length of {self.length}: {error}", "--length with more tokens"
                    ) from error
        return made

    def all(self) -> Evaluation:
        """Everything, the full cache first."""
        full = self.full()
        results = [self.measure(setting) for setting in self.settings]
        if STABILITY in self.options.tasks:
            smallest = min((setting.budget for setting in self.settings), default=0.0)
            for result in (r for r in results if r.budget == smallest):
                result.windows = self.stability(result.label, result.slots)
        tasks = [*self.samples, *self.options.suites]
        asked = self.options
        return Evaluation(
            self.recipe,
            self.length,
            asked.seed,
            asked.samples,
            self.training_length,
            full,
            results,
            tasks,
            self.skipped,
        )

    def full(self) -> Result:
        """The full cache on every task; its logits become the reference of every KL."""
        recipe = load_setting(self.recipe, FULL, None, self.common)
        # Built for the longest sample, but weighed as what a prompt of the run's length needs.
        exact = recipe.model_copy(update={"limits": recipe.limits.model_copy(update={"max_length": self.length})})
        size = plan_cache(exact, self.geometry).bytes()
        return self._measure(Setting(FULL, 0.0, self.length, size, recipe), None)

    def measure(self, setting: Setting) -> Result:
        """A setting on every task, after `full`."""
        return self._measure(setting, setting.budget)

    def stability(self, label: str, slots: int | None) -> list[Window]:
        """A method with so many slots (None: what the label says; the full cache needs none) over TIMES training
        lengths of text."""
        length = TIMES * self.training_length
        longer = longer_checkpoint(self.checkpoint, self.folder / "longer", length)
        ids, counted = long_text(self.language, length, self.options.seed)
        common = [*self.common, f"model.path={longer}", f"limits.max_length={length}", "limits.max_batch=1"]
        name = f"{label} over {length} tokens"
        with self.progress(f"building {name}", None):
            engine = self._engine(f"{label}-long", load_setting(self.recipe, label, slots, common))
        with self.progress(name, None):
            return run_long(engine, ids, counted, self.training_length)

    def _engine(self, name: str, recipe: Recipe) -> Engine:
        from kvexport.export.build import build

        return load(
            build(recipe, self.folder / "".join(c if c.isalnum() or c in ".-=" else "_" for c in name)), verify=False
        )

    def _measure(self, setting: Setting, budget: float | None) -> Result:
        """Build a setting and give it every task. budget: None for the full cache, whose logits become the
        reference."""
        name = FULL if budget is None else f"{setting.label}-{setting.slots}"
        with self.progress(f"building {name}", None):
            engine = self._engine(name, setting.recipe)
        seconds = step_seconds(engine, self.length)
        result = Result(setting.label, budget, setting.slots, setting.bytes, seconds)
        tasks = [(task, len(samples)) for task, samples in self.samples.items()]
        with self.progress(
            f"asking {name}", sum(n for _, n in tasks) + sum(map(len, self.options.suites.values()))
        ) as bar:
            for task, count in tasks:
                samples = self.samples[task]
                outcomes, logits = run_samples(engine, samples, self.options.batch, self.references.get(task))
                if budget is None:
                    self.references[task] = logits
                result.scores[task] = _score(task, samples, outcomes, compared=budget is not None)
                bar.advance(count)
            for suite, items in self.options.suites.items():
                result.scores[suite] = Score(suite, accuracy=mean(run_items(engine, items, self.options.batch)))
                bar.advance(len(items))
        if self.options.telemetry and budget is not None:
            with self.progress(f"watching {name} merge", None):
                result.telemetry = self._perturbations(engine, setting.recipe)
        return result

    def _perturbations(self, engine: Engine, recipe: Recipe) -> list[Perturbation]:
        from kvexport.validate.reference import TorchReference
        from kvexport.validate.watch import watch

        samples = self.samples.get("text") or next(iter(self.samples.values()))
        tokens = [np.array(sample.ids, dtype=np.int64) for sample in samples[: self.options.batch]]
        reference = TorchReference(self.checkpoint, engine.plan, self.geometry, recipe.cache.build_method(), recipe)
        return watch(reference, recipe, tokens)


def _score(task: str, samples: Sequence[Sample], outcomes: Sequence[Outcome], compared: bool) -> Score:
    nll = mean([o.nll for o in outcomes])
    score = Score(task, nll=nll)
    if TASKS[task].exact:
        keys = [(int(s.cell["length"]), s.cell.get("depth", math.nan)) for s in samples]
        answers: dict[tuple[int, float], list[bool]] = {}
        for key, outcome in zip(keys, outcomes, strict=True):
            answers.setdefault(key, []).append(outcome.right)
        cells = (
            tuple(Cell(*key, sum(hits), len(hits)) for key, hits in sorted(answers.items()))
            if TASKS[task].depths != (0.5,)
            else ()
        )
        score = Score(task, share(sum(o.right for o in outcomes), len(outcomes)), nll, cells=cells)
    if not compared:
        return score
    positions = np.concatenate([o.kl for o in outcomes])
    agreement = float(np.concatenate([o.agrees for o in outcomes]).mean())
    kl = mean([float(o.kl.mean()) for o in outcomes])
    return Score(task, score.accuracy, nll, kl, float(np.quantile(positions, 0.99)), agreement, score.cells)
