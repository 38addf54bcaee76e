"""The scores of a task, from the outcomes of its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvexport.evaluate.measure import Outcome
from kvexport.evaluate.result import ACCURACY, KL, Cell, Score
from kvexport.evaluate.statistics import mean, share
from kvexport.evaluate.tasks import TASKS, Sample


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
