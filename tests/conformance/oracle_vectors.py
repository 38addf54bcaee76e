"""The oracle's arithmetic on keys and values, in float64, one vector at a time."""

import math
from typing import Any

import numpy as np


def mean(rows: list[np.ndarray], weights: list[float]) -> np.ndarray:
    return np.asarray(sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights))


def turned(key: np.ndarray, steps: int, rotary: Any) -> np.ndarray:
    """Return the key rotated by `steps` positions, plane by plane, as complex numbers."""
    result, planes = key.copy(), len(rotary.inverse_frequencies)
    for f, frequency in enumerate(rotary.inverse_frequencies):
        i, j = (2 * f, 2 * f + 1) if rotary.interleaved else (f, f + planes)
        z = complex(key[i], key[j]) * complex(math.cos(steps * frequency), math.sin(steps * frequency))
        result[i], result[j] = z.real, z.imag
    return result


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-24)


def attention(logits: np.ndarray, visible: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """Return the softmax of logits [W, N] over the visible ones, weighted by votes; 0 in a row without any."""
    mass = np.zeros_like(logits)
    for row, sees, out in zip(logits, visible, mass, strict=True):
        if sees.any():
            out[sees] = votes[sees] * np.exp(row[sees] - row[sees].max())
            out /= out.sum()
    return mass


def ridge_regression(design: np.ndarray, target: np.ndarray, ridge: float) -> np.ndarray:
    """Return the x with the least ``|design x - wanted|^2 + ridge |x|^2``, from the normal equations."""
    size = design.shape[1]
    return np.linalg.solve(design.T @ design + ridge * np.eye(size), design.T @ target)
