"""The report of an evaluation of compression methods: tables for `kvexport.report`."""

from __future__ import annotations

import math

from kvexport.evaluate.result import Evaluation, named
from kvexport.evaluate.statistics import Estimate
from kvexport.evaluate.tasks import TASKS
from kvexport.report import Cell, KeyValues, Paragraph, Section, Table
from kvexport.units import format_bytes


def sections(evaluation: Evaluation) -> list[Section]:
    return [*_summary(evaluation), *_tables(evaluation)]


def _summary(evaluation: Evaluation) -> list[Section]:
    full = evaluation.full
    mapping: dict[str, Cell] = {
        "recipe": evaluation.recipe,
        "length": f"{evaluation.length} tokens",
        "samples": f"{evaluation.samples} per task, seed {evaluation.seed}",
        "full cache": f"{format_bytes(full.bytes)} for {full.slots} tokens",
        "intervals": "95 %: bootstrap over samples",
    }
    summaries = [f"{task}: {TASKS[task].__doc__}" for task in evaluation.tasks if task in TASKS]
    rows = [(named(r), r.budget, r.slots, r.bytes, r.bytes / full.bytes) for r in [full, *evaluation.results]]
    header = ("method", "budget", "slots", "bytes per sequence", "of full")
    note = "Methods of one budget have equal bytes: votes, scores, positions and slack counted."
    return [KeyValues("Evaluation", mapping), Paragraph("\n\n".join(summaries)), Table("Methods", header, rows, note)]


def _tables(evaluation: Evaluation) -> list[Section]:
    exact = [t for t in evaluation.tasks if evaluation.full.scores[t].accuracy is not None]
    texts = [t for t in evaluation.tasks if t in TASKS]
    everyone = [evaluation.full, *evaluation.results]
    out: list[Section] = []
    if exact:
        rows = [(named(r), *(_cell(r.scores[t].accuracy) for t in exact)) for r in everyone]
        out.append(Table("Accuracy", ("method", *exact), rows, "The mean score of the answers, and its interval."))
    if texts and evaluation.results:
        rows = [(named(r), *(_cell(r.scores[t].kl) for t in texts)) for r in evaluation.results]
        note = "Nats per judged position (the second half of a text), and the interval of the mean."
        out.append(Table("KL(full cache || method)", ("method", *texts), rows, note))
    for task in texts:
        shown = [(named(r), r.scores[task]) for r in everyone]
        lines = [
            (name, *_perplexity(score.nll), score.kl.value if score.kl else None, score.kl_99, score.agreement)
            for name, score in shown
        ]
        header = ("method", "perplexity", "from", "to", "KL, nats", "KL, 99th percentile", "top-1 agreement")
        out.append(Table(f"Perplexity and distance: {task}", header, lines))
    return out


def _cell(estimate: Estimate | None) -> str | None:
    return str(estimate) if estimate else None


def _perplexity(nll: Estimate | None) -> tuple[float | None, ...]:
    return (None, None, None) if nll is None else tuple(math.exp(min(x, 700.0)) for x in (nll.value, nll.low, nll.high))
