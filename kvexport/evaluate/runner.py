"""`kvexport eval`: compression methods at equal cache bytes on the same samples, with the engine of a deployment."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.evaluate.language import language_of
from kvexport.evaluate.measure import run_samples
from kvexport.evaluate.reference import Reference
from kvexport.evaluate.result import ACCURACY, Evaluation, Options, Result, Score, line, score_of
from kvexport.evaluate.settings import FULL, Setting, equal_bytes, load_setting
from kvexport.evaluate.statistics import mean
from kvexport.evaluate.suites import run_items
from kvexport.evaluate.tasks import TASKS, make_samples
from kvexport.language.tokenizer import FILE_NAME, Tokenizer
from kvexport.plan.planner import plan_cache
from kvexport.recipe.fields import Recipe
from kvexport.terminal import Progress, silent
from kvexport.units import format_seconds

if TYPE_CHECKING:
    from kvexport.export.weights.write import SharedWeights

Show = Callable[[str, int | None], Progress]
Tell = Callable[[str], None]


def evaluate(
    recipe: str,
    overrides: Sequence[str],
    options: Options,
    progress: Show = silent,
    tell: Tell = lambda _: None,
) -> Evaluation:
    with tempfile.TemporaryDirectory(prefix="kvexport-eval-") as folder:
        return Run(recipe, list(overrides), options, Path(folder), progress, tell).all()


class Run:
    def __init__(
        self,
        recipe: str,
        overrides: list[str],
        options: Options,
        folder: Path,
        progress: Show,
        tell: Tell = lambda _: None,
    ) -> None:
        from kvexport.export.build import read_model
        from kvexport.recipe.load import load_recipe

        self.recipe, self.options, self.folder, self.progress, self.tell = recipe, options, folder, progress, tell
        if unknown := [name for name in options.tasks if name not in TASKS]:
            raise UsageError(f"unknown task {unknown[0]!r}", f"--tasks {','.join(TASKS)}")
        own = load_recipe(recipe, overrides).recipe
        with progress("reading the checkpoint", None):
            shape = read_model(own)
        config = shape.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        limit = min(own.limits.max_length, positions or own.limits.max_length)  # limits.max_length may be unlimited
        self.length = options.length or (limit if options.suites else limit // 2)
        checkpoint: Path = shape.checkpoint.path
        tokenizer = Tokenizer.from_folder(checkpoint) if (checkpoint / FILE_NAME).exists() else None
        self.language = language_of(tokenizer, options.source)
        self.samples = {
            task: make_samples(task, self.language, options.samples, self.length, options.seed)
            for task in options.tasks
        }
        longest = max(limit if options.suites else 0, self.length)
        # Recipe settings that every engine of this run shares
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
        self.references: dict[str, Reference] = {}
        self._vocabulary = int(config.vocab_size)
        self._shared: dict[str, SharedWeights] = {}
        self._seconds: list[float] = []  # seconds of each setting measured in this run

    def all(self) -> Evaluation:
        full = self.full()
        self._report(full, len(self.settings))
        results = []
        for n, setting in enumerate(self.settings, 1):
            results.append(self.measure(setting))
            self._report(results[-1], len(self.settings) - n)
        return Evaluation(
            self.recipe,
            self.length,
            self.options.seed,
            self.options.samples,
            full,
            results,
            [*self.samples, *self.options.suites],
        )

    def full(self) -> Result:
        """Measure the full KV cache on every task. Later KL divergences are measured from its predictions."""
        recipe = load_setting(self.recipe, FULL, None, self.common)
        # The artifact is built for the longest sample; the reported bytes are those of a prompt of the run's length.
        exact = recipe.model_copy(update={"limits": recipe.limits.model_copy(update={"max_length": self.length})})
        size = plan_cache(exact, self.geometry).bytes()
        setting = Setting(FULL, None, self.length, size, recipe)
        self.references = {
            task: Reference(self.folder, task, [len(sample.counted) for sample in samples], self._vocabulary)
            for task, samples in self.samples.items()
        }
        return self.measure(setting)

    def _report(self, result: Result, left: int) -> None:
        text = line(result)
        if left:
            seconds = self._seconds[-1] * left
            text += f"; {left} of {len(self.settings)} to go, about {format_seconds(seconds)}"
        self.tell(text)

    def _engine(self, name: str, recipe: Recipe) -> Engine:
        from kvexport.export.build import build, share_weights

        model = recipe.model.model_dump_json()
        if model not in self._shared:
            self._shared[model] = share_weights(recipe, self.folder / "weights" / str(len(self._shared)))
        shared = self._shared[model]
        return load(build(recipe, self.folder / _file_name(name), shared=shared), verify=False)

    def measure(self, setting: Setting) -> Result:
        """Measure one compression method at one budget on every task.

        `full` must be called first, because the predictions of the full KV cache have to exist.
        """
        start, name, budget = time.monotonic(), _name(setting), setting.budget
        with self.progress(f"building {name}", None):
            engine = self._engine(name, setting.recipe)
        result = Result(setting.label, budget, setting.slots, setting.bytes)
        suites = self.options.suites
        total = sum(map(len, self.samples.values())) + sum(map(len, suites.values()))
        with self.progress(f"asking {name}", total) as bar:
            for task, samples in self.samples.items():
                outcomes = run_samples(
                    engine,
                    samples,
                    self.options.batch,
                    reference=None if budget is None else self.references[task],
                    writer=self.references[task] if budget is None else None,
                    advance=bar.advance,
                )
                result.scores[task] = score_of(task, outcomes, compared=budget is not None)
            for suite, items in suites.items():
                scores = run_items(engine, items, self.options.batch)
                result.scores[suite] = Score(suite, accuracy=mean(scores), samples={ACCURACY: tuple(scores)})
                bar.advance(len(items))
        shutil.rmtree(engine.path)
        self._seconds.append(time.monotonic() - start)
        return result


def _name(setting: Setting) -> str:
    return setting.label if setting.label == FULL else f"{setting.label}-{setting.slots}"


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-=" else "_" for c in name)
