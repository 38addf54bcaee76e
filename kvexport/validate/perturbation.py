"""Perturbation telemetry as plain figures: what every merge did to the attention output; their tables and drawings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from kvexport.report.sections import Cell, HeatMap, Paragraph, Plot, Section, Series, Table

QUERIES = ("current", "next")
STRETCHES = 12  # columns of a heat map
# With positions in the cache a merge also turns every key, and what a query would have seen without it says nothing of
# the merge alone.
NO_TELEMETRY = (
    "telemetry is taken with absolute positions alone: cache.positions is cache",
    "--set cache.positions=absolute, or no --telemetry",
)


def theorem_5(epsilon: Any, gamma: Any) -> Any:
    """KeepKV's Theorem 5 (arXiv 2504.09936), for numbers and arrays: merging changes an attention output by
    ``|o' - o| <= 2 eps (1 + eps) gamma / (1 - eps)^2`` at most, eps the largest relative error of an estimated score,
    of slots and of merged slots, and ``gamma = sum A_i |v_i - o|`` over the slots that merge, A their attention. It
    says nothing for eps >= 1."""
    return 2 * epsilon * (1 + epsilon) * gamma / (1 - epsilon) ** 2


@dataclass(frozen=True)
class Bound:
    """The bound of KeepKV's Theorem 5. heads: those for which it is defined; below_one: those for which it is below 1,
    the output's own norm; median: over the heads for which it is defined, and the observed error's there (None where
    there are none)."""

    heads: int
    below_one: int
    median: float | None
    observed: float | None


@dataclass(frozen=True)
class Perturbation:
    """What one merge of one layer did to one query's attention output. Errors are relative, ``|o' - o| / |o|``, over
    the query heads of all sequences that gave up slots.

    step: number of the merge; tokens: seen by the longest sequence. query: the last one before the merge (current), or
    the first one after it (next), which sees its own token as well. heads: of all sequences. mean, largest: from the
    cache before the merge to that after it. to_full: mean, from all keys and values that this run ever computed to the
    cache after the merge. by_slot: mean of the theorem's bound with every slot's own error in place of the largest.
    by_slot and theorem are None where the method keeps no estimates of scores.
    """

    step: int
    tokens: int
    layer: int
    query: Literal["current", "next"]
    heads: int
    mean: float
    largest: float
    to_full: float
    by_slot: float | None = None
    theorem: Bound | None = None


OBSERVED = ("merges", "current, mean", "next, median", "next, 95 %", "next, largest", "to full, mean")
BOUNDED = ("observed, mean", "by slot, mean", "theorem: no bound", "below 1", "bound, median", "observed there")
NOTE = (
    "Relative to the output's norm. Current: the last query before a merge; next: the first one after it. Quantiles "
    "over merges, of the "
    "mean over heads. To full: from all keys and values of the run."
)
BOUND_NOTE = (
    "The next query. No bound: heads where some estimate of a score is wrong by its own size or more, of which the "
    "theorem says nothing; "
    "the medians are of the others. Below 1: the output's own norm. By slot: every slot's own error in place of the "
    "largest."
)


def tables(named: Sequence[tuple[str, Sequence[Perturbation]]], what: str) -> list[Section]:
    """A row for every named set of merges (of a layer, of a method), headed `what`; the bounds in a table of their own,
    where any set has one."""
    observed = [(name, *_observed(rows)) for name, rows in named]
    out: list[Section] = [Table("Perturbation by merging", (what, *OBSERVED), observed, NOTE)]
    bounded = [(name, [r for r in rows if r.query == "next"]) for name, rows in named if any(r.theorem for r in rows)]
    if bounded:
        lines = [(name, *_bounded(rows)) for name, rows in bounded]
        out.append(Table("Perturbation and the bound of Theorem 5", (what, *BOUNDED), lines, BOUND_NOTE))
    return out


def layer_sections(rows: Sequence[Perturbation], of: str = "layer") -> list[Section]:
    """A run's tables, layer by layer, and its drawings. of: what the numbers are of, a "layer" or a "cache"."""
    if not rows:
        return [Paragraph("No perturbation by merging: no entry had to be evicted.")]
    named = [(f"{of} {i}", [r for r in rows if r.layer == i]) for i in sorted({r.layer for r in rows})]
    worst = max(rows, key=lambda r: r.largest)
    text = f"The largest error of a head, {worst.largest:.3g}, is {of} {worst.layer}'s "
    text += f"after {worst.tokens} tokens ({worst.query} query)."
    return [*tables([*named, ("all", rows)], of), Paragraph(text), *drawings(rows, "", of)]


def drawings(rows: Sequence[Perturbation], name: str, of: str = "layer") -> list[Section]:
    """Errors and bound merge by merge, and a map of layers (or caches, `of`) and merges. name: ends the titles; "" for
    none."""
    current, following = ([r for r in rows if r.query == query] for query in QUERIES)
    if not following:
        return []
    lines = [
        _line("next query", following, lambda rows: _mean(rows, "mean")),
        _line("current query", current, lambda rows: _mean(rows, "mean")),
        _line("next query, to full", following, lambda rows: _mean(rows, "to_full")),
    ]
    ending = f": {name}" if name else ""
    layers = _map(following, f"Perturbation by {of}{ending}", of)
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
    """Over the heads of all rows."""
    heads = sum(r.heads for r in rows)
    return sum(r.heads * getattr(r, figure) for r in rows) / heads if heads else None


def _median(rows: Sequence[Perturbation], figure: str) -> float | None:
    """Of the medians of all rows that have a bound."""
    found = [getattr(r.theorem, figure) for r in rows if r.theorem and r.theorem.heads]
    return float(np.median(found)) if found else None


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
    """A figure of all layers, merge by merge."""
    merges = [(step, list(of_step)) for step, of_step in groupby(rows, key=lambda r: r.step)]
    return Series(name, [float(step) for step, _ in merges], [figure(of_step) for _, of_step in merges])


def _map(rows: Sequence[Perturbation], title: str, of: str) -> HeatMap:
    """Layers against stretches of merges."""
    steps, layers = sorted({r.step for r in rows}), sorted({r.layer for r in rows})
    stretches = [s.tolist() for s in np.array_split(steps, min(STRETCHES, len(steps)))]
    ticks = [f"{s[0]}" if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches]
    values = [
        [_mean([r for r in rows if r.layer == i and r.step in stretch], "mean") for stretch in stretches]
        for i in layers
    ]
    return HeatMap(
        title,
        "merges",
        of,
        ticks,
        layers,
        values,
        low=0.0,
        note="Relative error of the next query, mean over heads.",
    )
