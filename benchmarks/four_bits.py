"""The sixteen levels of a 4-bit cache with the least mean square error, beside equal steps.

    python benchmarks/four_bits.py    # a second

The numbers of a rotated row of an int4 cache are nearly normal; a row is divided by its largest magnitude. Lloyd's
algorithm finds the levels for rows of 64 and of 128 together, with -127, 0 and 127 among them. Writes
benchmarks/results/four_bits.json: the levels, and for rows of each size the mean square error over the variance.
"""

from __future__ import annotations

import numpy as np
from common import save
from numpy.typing import NDArray

from kvexport.schema.state import INT4

Floats = NDArray[np.float64]
SIZES, ROWS = (64, 128, 256), 10_000
FINE = 16  # bins between two numbers
NUMBERS = np.arange(-127 * FINE, 127 * FINE + 1) / FINE


def levels(counts: Floats) -> Floats:
    """Return sixteen ascending levels for `NUMBERS` with the given counts."""
    ascending = np.interp(np.linspace(0.0, 1.0, 16), np.cumsum(counts) / counts.sum(), NUMBERS)
    for _ in range(3000):
        nearest = np.searchsorted((ascending[1:] + ascending[:-1]) / 2, NUMBERS)
        of, sums = (np.bincount(nearest, w, 16) for w in (counts, counts * NUMBERS))
        ascending = sums / np.maximum(of, 1e-9)
        ascending[[0, 7, 15]] = -127, 0, 127
    return np.rint(ascending)


def error(rows: Floats, rounded: Floats) -> float:
    """Return the mean square error over the variance of rows [n, D]."""
    return float(((rounded - rows) ** 2).mean() / (rows**2).mean())


def of_levels(rows: Floats, ascending: Floats) -> Floats:
    """Return the rows, rounded to multiples of 1/127 of their largest number and then to the nearest level."""
    scale = np.abs(rows).max(-1, keepdims=True) / 127
    nearest = np.searchsorted((ascending[1:] + ascending[:-1]) / 2, np.rint(rows / scale))
    return np.asarray(ascending[nearest] * scale)


def of_8(rows: Floats) -> Floats:
    """Return rows rounded to equal steps, -8 to 7, with the largest magnitude at -8, as in llama.cpp's q4_0 blocks."""
    largest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[:, None], -1) / -8
    return np.asarray(np.clip(np.rint(rows / largest), -8, 7) * largest)


def main() -> None:
    rng = np.random.default_rng(0)
    drawn = {size: rng.normal(size=(ROWS, size)) for size in SIZES}
    counts = np.zeros(len(NUMBERS))
    for size in (64, 128):
        largest = np.abs(drawn[size]).max(-1, keepdims=True)
        bins = np.rint(127 * FINE * drawn[size] / largest).astype(int).ravel() + 127 * FINE
        of = np.bincount(bins, np.broadcast_to(largest**2, drawn[size].shape).ravel(), len(NUMBERS))
        counts += (of + of[::-1]) / of.sum()
    sides = {
        "int4": lambda rows: of_levels(rows, np.sort(INT4).astype(np.float64)),
        "-7 .. 7": lambda rows: of_levels(rows, np.arange(-7, 8) * 127 / 7),
        "-8 .. 7": of_8,
        "-8 .. 7 in blocks of 32": lambda rows: of_8(rows.reshape(-1, 32)).reshape(rows.shape),
    }
    errors = {name: {size: error(rows, side(rows)) for size, rows in drawn.items()} for name, side in sides.items()}
    for name, of_sizes in errors.items():
        print(f"{name:26}", " ".join(f"{x:.5f}" for x in of_sizes.values()))
    level_values = levels(counts).astype(int).tolist()
    print(level_values)
    print(save("four_bits", {"levels": level_values, "errors": errors}))


if __name__ == "__main__":
    main()
