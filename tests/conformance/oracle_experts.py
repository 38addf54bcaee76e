"""Experts in plain numpy, token by token in float64: the oracle of tests/conformance/test_experts.py.

It shares no code with kvexport.ops.experts, on purpose.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ERF = np.vectorize(math.erf, otypes=[np.float64])


def integers(stored: Array, kind: str, shape: tuple[int, ...]) -> Array:
    """Return the whole numbers of a packed tensor, whose bytes are `stored`.

    A byte has two numbers of 4 bits, the first in its low half.
    """
    if kind.endswith("8"):
        return stored.view(kind).reshape(shape).astype(np.float64)
    flat = stored.reshape(-1)
    both = np.stack([flat % 16, flat // 16], 1).reshape(-1)[: math.prod(shape)].astype(np.float64)
    return np.where((both > 7) & (kind == "int4"), both - 16, both).reshape(shape)


def dequantized(numbers: Array, scale: Array, zero: Array | None, minimum: Array | None) -> Array:
    """Return (numbers - zero) scale, or numbers scale + minimum, of [experts, outputs, inputs] in groups."""
    experts, outputs, inputs = numbers.shape
    groups = numbers.reshape(experts, outputs, scale.shape[2], -1)
    if zero is not None:
        groups = groups - zero[..., None]
    values = groups * scale.astype(np.float64)[..., None]
    if minimum is not None:
        values = values + minimum.astype(np.float64)[..., None]
    return values.reshape(experts, outputs, inputs)


def activation(kind: str, x: Array, slope: float) -> Array:
    if kind == "silu":
        return x / (1 + np.exp(-slope * x))
    if kind == "gelu":
        return x * 0.5 * (1 + ERF(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    positive = np.where(x > 0, x, 0)
    return positive**2 if kind == "relu_squared" else positive


def rounded(x: Array, block: int) -> Array:
    """Round a row as the CPU kernels do if an expert has many rows.

    Each block is rounded to multiples of 1/127 of its largest magnitude, or of 1/32512 if that magnitude is above five
    times the root mean square of the row.
    """
    blocks = np.pad(x, (0, -len(x) % block)).reshape(-1, block)
    largest = np.abs(blocks).max(1, keepdims=True)
    step = largest / np.where(largest > 5 * np.sqrt(np.mean(x**2)), 32512, 127)
    numbers: Array = np.round(blocks / np.where(step, step, 1)) * step
    return numbers.reshape(-1)[: len(x)]


def experts(
    attributes: Mapping[str, Any], tensors: Mapping[str, Array], blocks: tuple[int, int] | None = None
) -> Array:
    """Return the output [tokens, hidden] for float weights [experts, outputs, inputs].

    Indices that belong to no expert contribute nothing. If `blocks` is given, the inputs of the two products are
    rounded in blocks of these sizes, for experts of 48 tokens or more.
    """
    down = tensors["down"]
    counts = np.bincount(np.where(tensors["indices"] < 0, len(down), tensors["indices"]).reshape(-1).clip(0, len(down)))
    output = np.zeros_like(tensors["input"], np.float64)
    for t, x in enumerate(tensors["input"].astype(np.float64)):
        for e, factor in sorted(zip(tensors["indices"][t].tolist(), tensors["weights"][t].tolist(), strict=True)):
            if not 0 <= e < len(down):
                continue
            rounds = blocks if blocks and counts[e] >= 48 else None
            first = tensors["first"][e] @ (rounded(x, rounds[0]) if rounds else x)
            if attributes["bias"]:
                first = first + tensors["first_bias"][e]
            if attributes["gate"]:
                half = len(first) // 2
                gate, up = first[:half], first[half:]
                if attributes["limit"]:
                    limit = attributes["limit"]
                    gate, up = np.minimum(gate, limit), np.maximum(np.minimum(up, limit), -limit)
                inner = activation(attributes["activation"], gate, attributes["slope"]) * (up + attributes["up_offset"])
            else:
                inner = activation(attributes["activation"], first, attributes["slope"])
            product = down[e] @ (rounded(inner, rounds[1]) if rounds else inner)
            if attributes["bias"]:
                product = product + tensors["down_bias"][e]
            output[t] += factor * product
    return output
