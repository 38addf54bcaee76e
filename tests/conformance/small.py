"""An int8 cache once more, in float64 numpy, written from docs/contract.md ("A small cache") alone: what rows are
stored as, and what the stored stand for."""

from __future__ import annotations

import numpy as np

Arrays = dict[str, np.ndarray]


def hadamard(size: int) -> np.ndarray:
    """The orthonormal Hadamard matrix of `size` dimensions, in blocks of the largest power of two that divides it."""
    block = size & -size
    entry = [[(-1.0) ** bin(i & j).count("1") for j in range(block)] for i in range(block)]
    return np.kron(np.eye(size // block), np.array(entry) / np.sqrt(block))


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def stored(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [..., D] as int8 numbers and float32 scales [...]."""
    turned = rows.astype(np.float64) @ hadamard(rows.shape[-1])
    scale = bfloat16(np.abs(turned).max(-1) / 127)
    numbers = np.rint(turned / np.where(scale > 0, scale, 1.0)[..., None])
    return np.clip(numbers, -127, 127).astype(np.int8), scale


def plain(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The rows that they stand for, in float64."""
    return (numbers.astype(np.float64) * scale[..., None]) @ hadamard(numbers.shape[-1])


def unmistakable(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """Rows near `rows` that lie so far from where a rounding changes that float32 stores them as float64 does."""
    numbers, scale = stored(rows)
    off = rng.uniform(-0.3, 0.3, numbers.shape) * (np.abs(numbers) < 126)
    return ((numbers + off) * scale[..., None]) @ hadamard(rows.shape[-1])


def small(state: Arrays, prefix: str = "") -> Arrays:
    """A state with keys and values in int8, and their scales."""
    result = dict(state)
    for name in ("key", "value"):
        result[f"{prefix}{name}"], result[f"{prefix}{name}_scale"] = stored(state[f"{prefix}{name}"])
    return result


def wide(state: Arrays, prefix: str = "") -> Arrays:
    """What a small state stands for, in float64 and without scales."""
    result = {name: x for name, x in state.items() if not name.endswith("_scale")}
    for name in ("key", "value"):
        result[prefix + name] = plain(state[prefix + name], state[f"{prefix}{name}_scale"])
    return result
