"""The logits at the evaluated positions of samples, all in memory at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvexport.engine.engine import Engine
from kvexport.evaluate.measure import Rows, counted_rows
from kvexport.evaluate.tasks import Sample


def counted_logits(engine: Engine, samples: Sequence[Sample]) -> list[Rows]:
    """Return the logits [evaluated positions, vocabulary] of every sample, after running all samples in one batch."""
    rows: list[list[Rows]] = [[] for _ in samples]
    for lane, _, logits in counted_rows(engine, samples):
        rows[lane].append(logits)
    return [np.concatenate(logits) for logits in rows]
