"""Comparison of two states of a layer's KV cache, or of two arrays, within tolerances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.methods.base import Method
from kvexport.plan.cache import LayerCache, stored_rows
from kvexport.schema.state import SMALL

Array = NDArray[Any]
NOTHING_YET = 1e29  # a logarithmic score of larger magnitude stands for the logarithm of 0
NO_SCORE = 1e-7  # a probability too small to affect which entries are evicted


@dataclass(frozen=True)
class Tolerance:
    hidden: float  # of hidden states, relative to the norm of what a layer adds to the hidden state
    vectors: float  # of keys and values, relative to their norm
    scores: float  # of scores, relative to the score; absolute for the logarithm of a score if that is below 1
    votes: float  # of votes, relative to the votes of a slot
    rounding: float  # of hidden states, relative to their norm: their sums are rounded to the model's type


# The engine and PyTorch get the same inputs for each layer, so no layer magnifies the error of an earlier one. On
# SmolLM2-135M-Instruct in float32, with text and random tokens, the measured differences were: hidden states 7e-7
# (median) and 6e-6 (largest), keys and values 1e-6, logarithms of scores 1.1e-5. A float16 model rounds between the
# operators of a layer, and PyTorch does so more often than the engine; there the same differences were 1.2e-3, 1.8e-2,
# 1.5e-3 and 2.4e-2. In an int8 cache, a number near a rounding border may be one step off, and a step is 1/127 of the
# row's largest number. An int4 cache has 15 steps: most are 1/12 of the row's largest number, the outermost ones 1/4.
LAYERS = {
    "float32": Tolerance(1e-5, 1e-5, 1e-4, 1e-4, 2.0**-22),
    "float16": Tolerance(3e-2, 1e-2, 1e-1, 1e-4, 2.0**-9),
    "int8": Tolerance(2e-2, 2e-2, 1e-1, 1e-4, 2.0**-9),
    "int4": Tolerance(2e-1, 2e-1, 5e-1, 1e-4, 2.0**-9),
    "k8v4": Tolerance(2e-1, 2e-1, 1e-1, 1e-4, 2.0**-9),
}
# Merges compute in float32 for every type of KV cache, and round once to the cache's type.
MERGES = {
    "float32": Tolerance(1e-5, 1e-5, 1e-4, 1e-4, 2.0**-22),
    "float16": Tolerance(2e-3, 2e-3, 1e-4, 1e-4, 2.0**-9),
    "int8": Tolerance(2e-2, 2e-2, 1e-4, 1e-4, 2.0**-9),
    "int4": Tolerance(2e-1, 2e-1, 1e-4, 1e-4, 2.0**-9),
    "k8v4": Tolerance(2e-1, 2e-1, 1e-4, 1e-4, 2.0**-9),
}

# If a backend's decoder cannot be cut between layers, it runs as a whole. The first layer is checked with the
# tolerances of LAYERS; later layers may differ by as much as earlier layers magnify rounding errors.
WHOLE = {
    "float32": Tolerance(1e-3, 1e-3, 1e-2, 1e-4, 2.0**-22),
    "float16": Tolerance(3e-1, 3e-1, 3e-1, 1e-4, 2.0**-9),
    "int8": Tolerance(3e-1, 3e-1, 3e-1, 1e-4, 2.0**-9),
    "int4": Tolerance(1.0, 1.0, 1.0, 1e-4, 2.0**-9),
    "k8v4": Tolerance(1.0, 1.0, 1.0, 1e-4, 2.0**-9),
}


def tolerance_of(table: Mapping[str, Tolerance], *types: str) -> Tolerance:
    """Return a tolerance for several data types at once: each field is the largest of the types' fields in `table`."""
    tolerances = [table[name] for name in types]
    return Tolerance(*(max(getattr(x, field.name) for x in tolerances) for field in fields(Tolerance)))


@dataclass(frozen=True)
class Difference:
    tensor: str
    difference: float  # size of the difference
    allowed: float  # largest difference that passes
    lane: int  # row of the batch
    head: int | None  # KV head; None for tensors without heads
    slot: int  # slot of the cache, or index of the token within the call


def norm(x: Array) -> Array:
    return np.asarray(np.linalg.norm(x.astype(np.float64), axis=-1))


def worst(tensor: str, difference: Array, allowed: Array | float) -> Difference | None:
    difference = np.nan_to_num(difference, nan=np.inf)
    allowed = np.broadcast_to(allowed, difference.shape)
    if not (over := difference > allowed).any():
        return None
    size = np.where(over, difference / np.maximum(allowed, 1e-300), 0.0)
    index = np.unravel_index(int(size.argmax()), size.shape)
    head = int(index[1]) if len(index) > 2 else None
    return Difference(tensor, float(difference[index]), float(allowed[index]), int(index[0]), head, int(index[-1]))


def heads_of(layer: LayerCache, state: Sequence[Array]) -> list[list[Array]]:
    """Return views [B, H, C, ...] of a layer's state: one group for all heads of one capacity, else one for each."""
    alike = len({*layer.capacity}) == 1
    parts = []
    for tensor, x in zip(layer.state, state, strict=True):
        axis = tensor.slot_axis
        if not alike:
            parts.append([layer.of_head(tensor, x, head) for head in range(layer.kv_heads)])
        elif axis is None:
            parts.append([x])
        else:
            view = x.reshape(*x.shape[:axis], layer.kv_heads, layer.capacity[0], *x.shape[axis + 1 :])
            parts.append([np.moveaxis(view, axis, 1)])
    return [list(own) for own in zip(*parts, strict=True)]


def named_views(layer: LayerCache, views: Sequence[Array]) -> dict[str, Array]:
    """Return views of a layer's state tensors by name, with keys and values dequantized to float32."""
    named = {tensor.name: x for tensor, x in zip(layer.state, views, strict=True)}
    if layer.dtype in SMALL:
        for name in ("key", "value"):
            named[name] = stored_rows(named[name], named.pop(f"{name}_scale"))
    return named


def named_heads(layer: LayerCache, state: Sequence[Array]) -> list[dict[str, Array]]:
    return [named_views(layer, views) for views in heads_of(layer, state)]


def state_difference(
    layer: LayerCache, method: Method, actual: Sequence[Array], expected: Sequence[Array], tolerance: Tolerance
) -> Difference | None:
    """Return the first difference between two states of a layer's KV cache beyond its tolerance, or None."""
    parts = zip(named_heads(layer, actual), named_heads(layer, expected), strict=True)
    for first, (own, other) in enumerate(parts):
        if difference := heads_difference(method, own, other, tolerance):
            return replace(difference, head=first + (difference.head or 0))
    return None


def heads_difference(
    method: Method, actual: Mapping[str, Array], expected: Mapping[str, Array], tolerance: Tolerance
) -> Difference | None:
    first = ("position", "votes", "key", "value", "score")
    for name in (*first, *(name for name in actual if name not in first)):
        a, b = actual[name], expected[name]
        if np.array_equal(a, b):
            continue
        if difference := _tensor_difference(name, method, a, b, tolerance):
            return difference
    return None


def _tensor_difference(name: str, method: Method, a: Array, b: Array, tolerance: Tolerance) -> Difference | None:
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
        size = np.abs(b.astype(np.float64))
        if name in ("key", "value"):
            return worst(name, norm(np.nan_to_num(gap, nan=np.inf)), tolerance.vectors * norm(b))
        if name == "votes":
            return worst(name, np.where((a > 0) == (b > 0), gap, np.inf), tolerance.votes * size)
        if name == "score":
            for k, statistic in enumerate(method.statistics):
                least = 1.0 if statistic.kind == "log_ema" else NO_SCORE / tolerance.scores
                off = np.where((size[:, :, k] > NOTHING_YET) & (gap[:, :, k] < NOTHING_YET * 1e-3), 0.0, gap[:, :, k])
                if difference := worst(name, off, tolerance.scores * np.maximum(size[:, :, k], least)):
                    return difference
            return None
        return worst(name, gap.reshape(*gap.shape[:2], -1), 0.0 if name == "position" else tolerance.votes)


def largest_differences(name: str, a: Array, b: Array, heads: Array | None = None) -> float:
    """Return the largest difference of two views [B, H, ...]; of keys and values relative to their norms."""
    if heads is not None:
        a, b = a[heads], b[heads]
    if np.array_equal(a, b):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
        if name in ("key", "value"):
            gap = norm(gap) / np.maximum(norm(b), 1e-30)
        elif name == "score":
            gap = np.where((np.abs(a) > NOTHING_YET) & (np.abs(b) > NOTHING_YET), 0.0, gap)
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))
