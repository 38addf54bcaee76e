"""The axes of plots in reports: places of ticks, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import NamedTuple

TINY = 1e-100  # smaller numbers are not drawn


def format_number(value: float | None) -> str:
    """Return a number as text for a report; None becomes a dash.

    An integer is written in full. A float has 4 significant digits; it is rounded to an integer from 1,000 on, and
    scientific below 1e-4 and from 1e7 on.
    """
    if value is None or isinstance(value, bool):
        return {None: "\N{EN DASH}", True: "yes", False: "no"}[value]
    if isinstance(value, Integral) or 1000 <= abs(value) < 1e7:
        return f"{round(value):,}" if abs(value) >= 9_999.5 else f"{round(value)}"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(float(value))
    return f"{float(value):.4g}" if 1e-4 <= abs(value) < 1e7 else scientific(value, 3)


def scientific(value: float, digits: int) -> str:
    """Return a number in scientific notation with at most `digits` digits after the point, such as 1.5e-7."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


class Axis(NamedTuple):
    """The axis of a plot: ticks from one end to the other, their labels, and whether the axis is logarithmic."""

    ticks: Sequence[float]
    labels: Sequence[str]
    log: bool

    def place(self, value: float) -> float:
        """Return the place of a value on the axis: 0 at the first tick, 1 at the last.

        Values beyond the ends, such as a band that reaches zero, are placed at the end.
        """
        scale = math.log10 if self.log else float
        first, last = scale(self.ticks[0]), scale(self.ticks[-1])
        return (scale(min(max(value, self.ticks[0]), self.ticks[-1])) - first) / (last - first)


def axis_of(values: Sequence[float], log: bool, fits: Callable[[Sequence[str]], bool]) -> Axis:
    """Return the axis of a plot with the most ticks that spans the values and whose labels fit."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    wide = log and math.log10(high) - math.log10(low) > 0.5
    tried = [Axis(ticks, labels, log) for ticks, labels in (_log_ticks(values) if wide else _even_ticks(low, high))]
    return next((axis for axis in tried if fits(axis.labels)), tried[-1])


def _log_ticks(values: Sequence[float]) -> Iterator[tuple[list[float], list[str]]]:
    """Yield ever fewer ticks of a logarithmic axis, with their labels.

    Ticks are powers of two if every value is one (lengths, budgets), else 1-2-5 steps and then powers of ten.
    """
    base = 2 if all(math.frexp(value)[0] == 0.5 for value in values) else 10
    first, last = math.floor(math.log(min(values), base) + 1e-9), math.ceil(math.log(max(values), base) - 1e-9)
    if base == 10:
        steps = [float(f"{m}e{e}") for e in range(first - 1, last + 2) for m in (1, 2, 5)]
        start, end = max(t for t in steps if t <= min(values)), min(t for t in steps if t >= max(values))
        yield (ticks := [t for t in steps if start <= t <= end]), list(map(format_number, ticks))
    for step in (1, 2, 3, 5, 10, 20, 50, 100):
        yield (
            (ticks := [float(base) ** e for e in range(first // step * step, last + step, step)]),
            list(map(format_number, ticks)),
        )


def _even_ticks(low: float, high: float) -> Iterator[tuple[list[float], list[str]]]:
    """Yield ever fewer ticks of a linear axis, with their labels: 1, 2 or 5 times a power of ten apart.

    The ticks enclose the values.
    """
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, TINY):
        pad = 0.1 * size if size > TINY else 1.0
        low, high, size = low - pad, high + pad, size + pad
    for count in (7, 5, 4, 3, 2):
        least = (high - low) / count
        place = math.floor(math.log10(least))
        step = next(s for s in (float(f"{m}e{place}") for m in (1, 2, 5, 10)) if s >= least * (1 - 1e-9))
        place = math.floor(math.log10(step) + 1e-9)
        ticks = [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]
        if place >= -4 and size < 1e7:
            yield ticks, [f"{t:,.{max(-place, 0)}f}" for t in ticks]
        else:
            yield (
                ticks,
                [scientific(t, max(math.floor(math.log10(abs(t)) + 1e-9) - place, 0)) if t else "0" for t in ticks],
            )
