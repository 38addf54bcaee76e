"""Random packed weights of any format."""

from typing import Any

import numpy as np

from kvexport.ops.packed import PackedFormat, pack

MOST_FACTOR = 63  # of a super-scale


def random_parts(
    rng: np.random.Generator, packing: PackedFormat, n: int, k: int, size: float = 1.0
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the stored tensors of a random weight [n, k], whose values have a size of about `size`."""
    parts: dict[str, Any] = {}
    for part, (dtype, shape) in packing.tensors(n, k).items():
        if part in ("weight", "zero"):
            low, bits = (0, 4) if packing.high_bits else (packing.lowest, packing.bits)
            bits = 8 if packing.low_bits == 2 else bits  # any byte has four numbers of 2 bits
            parts[part] = pack(rng.integers(low, low + (1 << bits), shape), bits)
        elif part == "high" or (packing.scale_dtype == "int6" and part == "scale"):
            parts[part] = rng.integers(0, 256, shape, np.uint8)
        elif dtype == "uint4":
            parts[part] = pack(rng.integers(0, 16, shape), 4)
        elif part == "table":
            parts[part] = np.array(packing.table, dtype)
        elif part == "order":
            parts[part] = rng.permutation(k)
        elif part == "exponent":
            parts[part] = np.where(rng.random(shape) < 0.1, 1, rng.integers(120, 127, shape)).astype(dtype)
        elif dtype == "int8":
            parts[part] = rng.integers(-MOST_FACTOR, MOST_FACTOR + 1, shape, np.int8)
        else:
            spread = size / (1 << (packing.bits - 1)) if part.endswith("scale") else size
            spread /= MOST_FACTOR / 2 if part.startswith("super") else 1
            parts[part] = (rng.standard_normal(shape) * spread).astype(dtype)
    return parts
