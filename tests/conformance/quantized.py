"""A quantized cache in float64 numpy: how rows are stored and read.

It is written only from docs/reference/contract.md ("A quantized cache").
"""

import numpy as np

Arrays = dict[str, np.ndarray]
# The bits of a key's numbers and of a value's numbers, for every type of cache.
BITS = {"int8": (8, 8), "int4": (4, 4), "k8v4": (8, 4)}
FOUR_BITS = np.array([0, 11, 22, 34, 46, 60, 77, 98, 127, -127, -94, -72, -54, -39, -25, -12])


def hadamard(size: int) -> np.ndarray:
    block = size & -size
    entry = [[(-1.0) ** bin(i & j).count("1") for j in range(block)] for i in range(block)]
    return np.kron(np.eye(size // block), np.array(entry) / np.sqrt(block))


def bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def stored(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Store rows [..., D].

    Returns:
        int8 numbers [..., D], or codes of four bits, two in a byte [..., D / 2]; and float32 scales [...].
    """
    turned = rows.astype(np.float64) @ hadamard(rows.shape[-1])
    scale = bfloat16(np.abs(turned).max(-1) / 127)
    numbers = np.clip(np.rint(turned / np.where(scale > 0, scale, 1.0)[..., None]), -127, 127).astype(np.int8)
    if bits == 8:
        return numbers, scale
    # If two numbers are equally near, the one nearer to 0 is chosen: it comes first in this order.
    order = np.argsort(np.abs(FOUR_BITS), kind="stable")
    nearest = np.abs(numbers[..., None] - FOUR_BITS[order].astype(np.float64)).argmin(-1)
    codes = order[nearest].astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def numbers_of(held: np.ndarray) -> np.ndarray:
    if held.dtype == np.int8:
        return held
    return FOUR_BITS[np.stack([held & 15, held >> 4], axis=-1).reshape(*held.shape[:-1], -1)].astype(np.int8)


def plain(held: np.ndarray, scale: np.ndarray) -> np.ndarray:
    numbers = numbers_of(held)
    return (numbers.astype(np.float64) * scale[..., None]) @ hadamard(numbers.shape[-1])


def half_steps(held: np.ndarray) -> np.ndarray:
    """Return the largest rounding error of each stored number [..., D], as a multiple of the scale."""
    if held.dtype == np.int8:
        return np.full(held.shape, 0.51)
    ascending = np.sort(FOUR_BITS)
    gaps = np.diff(ascending, prepend=-127, append=127)
    farther = np.maximum(gaps[:-1], gaps[1:]) / 2
    return farther[np.searchsorted(ascending, numbers_of(held))] + 0.51


def unmistakable(rng: np.random.Generator, rows: np.ndarray, bits: int) -> np.ndarray:
    """Return rows near `rows`, far from every rounding boundary, so that float32 stores them as float64 does."""
    held, scale = stored(rows, bits)
    numbers, far = numbers_of(held), 0.3 if bits == 8 else 3.0
    off = rng.uniform(-far, far, numbers.shape) * (np.abs(numbers) < 126)
    return ((numbers + off) * scale[..., None]) @ hadamard(rows.shape[-1])


def small(state: Arrays, cache_type: str, prefix: str = "") -> Arrays:
    """Return the state with its keys and values stored in this type of cache, with their scales."""
    result = dict(state)
    for name, bits in zip(("key", "value"), BITS[cache_type], strict=True):
        result[f"{prefix}{name}"], result[f"{prefix}{name}_scale"] = stored(state[f"{prefix}{name}"], bits)
    return result


def wide(state: Arrays, prefix: str = "") -> Arrays:
    """Return the float64 values of a small state, without scales."""
    result = {name: x for name, x in state.items() if not name.endswith("_scale")}
    for name in ("key", "value"):
        result[prefix + name] = plain(state[prefix + name], state[f"{prefix}{name}_scale"])
    return result
