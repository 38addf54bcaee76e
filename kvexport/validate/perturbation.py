"""Figures, tables and drawings of perturbation: how much each merge of KV-cache entries changes attention outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from kvexport.report.sections import Cell, HeatMap, Paragraph, Plot, Section, Series, Table

QUERIES = ("current", "next")
INTERVALS = 12  # columns of a heat map
# With cache.positions: cache, a merge also rotates every key, so outputs before and after it are not comparable.
NO_TELEMETRY = (
    "telemetry needs absolute positions, and cache.positions is cache",
    "--set cache.positions=absolute, or no --telemetry",
)


def theorem_5(epsilon: Any, gamma: Any) -> Any:
    """Return the bound of KeepKV's Theorem 5 (arXiv 2504.09936) on the change of an attention output by a merge.

    The bound is ``|o' - o| <= 2 eps (1 + eps) gamma / (1 - eps)^2``. It holds for eps < 1 only.
    """
    return 2 * epsilon * (1 + epsilon) * gamma / (1 - epsilon) ** 2


@dataclass(frozen=True)
class Bound:
    """Statistics of the error bound of KeepKV's Theorem 5 over attention heads, next to observed errors."""

    heads: int  # number of heads for which the bound is defined
    below_one: int  # number of heads whose bound is below 1, the norm of the output itself
    median: float | None  # median bound over the heads with a defined bound; None if there are none
    observed: float | None  # median observed error over the same heads; None if there are none


@dataclass(frozen=True)
class Perturbation:
    """The change of one query's attention output by one merge of one layer.

    Errors are relative, ``|o' - o| / |o|``, over the query heads of all sequences that evicted entries.
    """

    step: int  # number of the merge
    tokens: int  # tokens that the longest sequence has seen
    layer: int  # number of the cache
    # "current" for the last query before the merge, "next" for the first one after it (which sees its own token)
    query: Literal["current", "next"]
    heads: int  # number of heads, over all sequences
    # Mean difference between the attention outputs over the cache before the merge and over the cache after it
    mean: float
    largest: float  # largest such difference
    # Mean difference between the attention output over all keys and values of this run and over the cache after the
    # merge
    to_full: float
    # Mean of the theorem's bound with each slot's own error instead of the largest error. None if the method has no
    # estimates of scores.
    by_slot: float | None = None
    theorem: Bound | None = None  # theorem's bound; None if the method has no estimates of scores


OBSERVED = ("merges", "current, mean", "next, median", "next, 95 %", "next, largest", "to full, mean")
BOUNDED = ("observed, mean", "by slot, mean", "theorem: no bound", "below 1", "bound, median", "observed there")
NOTE = (
    "Errors relative to the norm of the attention output. Current: the last query before a merge; next: the first one "
    "after it. Quantiles are over merges, of the mean over heads. To full: relative to all keys and values of the run."
)
BOUND_NOTE = (
    "Figures of the next query. No bound: share of heads with an estimate that is wrong by its own size or more, for "
    "which the theorem gives no bound; the medians are over the other heads. Below 1: the bound is below the norm of "
    "the output. By slot: the bound with each slot's own error in place of the largest."
)


def tables(named: Sequence[tuple[str, Sequence[Perturbation]]], what: str) -> list[Section]:
    observed = [(name, *_observed(rows)) for name, rows in named]
    out: list[Section] = [Table("Perturbation by merging", (what, *OBSERVED), observed, NOTE)]
    bounded = [(name, [r for r in rows if r.query == "next"]) for name, rows in named if any(r.theorem for r in rows)]
    if bounded:
        lines = [(name, *_bounded(rows)) for name, rows in bounded]
        out.append(Table("Perturbation and the bound of Theorem 5", (what, *BOUNDED), lines, BOUND_NOTE))
    return out


def layer_sections(rows: Sequence[Perturbation]) -> list[Section]:
    """Return the report on one run's attention errors: tables layer by layer, and drawings."""
    if not rows:
        return [Paragraph("No perturbation by merging: no entry had to be evicted.")]
    named = [(f"layer {i}", [r for r in rows if r.layer == i]) for i in sorted({r.layer for r in rows})]
    worst = max(rows, key=lambda r: r.largest)
    text = f"The largest error of a head, {worst.largest:.3g}, is layer {worst.layer}'s "
    text += f"after {worst.tokens} tokens ({worst.query} query)."
    return [*tables([*named, ("all", rows)], "layer"), Paragraph(text), *drawings(rows, "")]


def drawings(rows: Sequence[Perturbation], name: str) -> list[Section]:
    """Return plots of attention errors and bounds merge by merge, and a heat map of layers and merges."""
    current, following = ([r for r in rows if r.query == query] for query in QUERIES)
    if not following:
        return []
    lines = [
        _line("next query", following, lambda rows: _mean(rows, "mean")),
        _line("current query", current, lambda rows: _mean(rows, "mean")),
        _line("next query, to full", following, lambda rows: _mean(rows, "to_full")),
    ]
    ending = f": {name}" if name else ""
    layers = _map(following, f"Perturbation by layer{ending}")
    if following[0].theorem is None:
        return [_plot(f"Perturbation, merge by merge{ending}", "mean over heads", lines), layers]
    lines.append(_line("next query, bound by slot", following, lambda rows: _mean(rows, "by_slot")))
    known = [_line("bound", following, lambda rows: _median(rows, "median"))]
    known.append(_line("next query, the same heads", following, lambda rows: _median(rows, "observed")))
    return [
        _plot(f"Perturbation, merge by merge{ending}", "mean over heads", lines),
        _plot(f"Theorem 5 where it has a bound{ending}", "median over heads", known),
        layers,
    ]


def _plot(title: str, over: str, lines: Sequence[Series]) -> Plot:
    return Plot(title, "merge", f"relative error, {over}", lines, y_log=True)


def _mean(rows: Sequence[Perturbation], figure: str) -> float | None:
    heads = sum(r.heads for r in rows)
    return sum(r.heads * getattr(r, figure) for r in rows) / heads if heads else None


def _median(rows: Sequence[Perturbation], figure: str) -> float | None:
    values = [getattr(r.theorem, figure) for r in rows if r.theorem and r.theorem.heads]
    return float(np.median(values)) if values else None


def _observed(rows: Sequence[Perturbation]) -> tuple[Cell, ...]:
    current, following = ([r for r in rows if r.query == query] for query in QUERIES)
    means = [r.mean for r in following] or [math.nan]
    largest = max((r.largest for r in following), default=None)
    quantiles = (float(q) if math.isfinite(q) else None for q in np.quantile(means, (0.5, 0.95)))
    return len({r.step for r in rows}), _mean(current, "mean"), *quantiles, largest, _mean(following, "to_full")


def _bounded(rows: Sequence[Perturbation]) -> tuple[Cell, ...]:
    heads, bounds = sum(r.heads for r in rows), [r.theorem for r in rows if r.theorem]
    counts = (heads - sum(b.heads for b in bounds), sum(b.below_one for b in bounds))
    shares = (f"{count / heads:.1%}" if heads else None for count in counts)
    return _mean(rows, "mean"), _mean(rows, "by_slot"), *shares, _median(rows, "median"), _median(rows, "observed")


def _line(name: str, rows: Sequence[Perturbation], figure: Callable[[Sequence[Perturbation]], float | None]) -> Series:
    """Return one telemetry figure per merge, taken over all layers, as the points of a line in a plot."""
    merges = [(step, list(of_step)) for step, of_step in groupby(rows, key=lambda r: r.step)]
    return Series(name, [float(step) for step, _ in merges], [figure(of_step) for _, of_step in merges])


def _map(rows: Sequence[Perturbation], title: str) -> HeatMap:
    """Return a heat map of attention errors: layers against intervals of merges."""
    steps, layers = sorted({r.step for r in rows}), sorted({r.layer for r in rows})
    stretches = [s.tolist() for s in np.array_split(steps, min(INTERVALS, len(steps)))]
    ticks = [f"{s[0]}" if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches]
    values = [
        [_mean([r for r in rows if r.layer == i and r.step in stretch], "mean") for stretch in stretches]
        for i in layers
    ]
    return HeatMap(
        title,
        "merges",
        "layer",
        ticks,
        layers,
        values,
        low=0.0,
        note="Relative error of the next query, mean over heads.",
    )
