"""How far two states of a layer, or two sets of rows, are apart, and how far they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import LayerCache, stored_rows
from kvexport.methods.base import Method
from kvexport.schema.state import SMALL

Array = NDArray[Any]
NOTHING_YET = 1e29  # a logarithmic score beyond this is ln(0)
NO_SCORE = 1e-7  # a probability of which nothing depends


@dataclass(frozen=True)
class Tolerance:
    """What one operator, or one layer, may differ by from PyTorch's. hidden: of the norm of what a layer adds to the
    hidden state; vectors: of the norm of a key or a value; scores: of a score, or of a logarithm of one (1 at least);
    votes: of votes. rounding: of the norm of the hidden state, whose sums are rounded to the model's type."""

    hidden: float
    vectors: float
    scores: float
    votes: float
    rounding: float


# Each is given what the other was given, so that no error is magnified by a layer. Measured on SmolLM2-135M-Instruct,
# with text and with random tokens, in float32: hidden states 7e-7 in the median and 6e-6 at the most, keys and values
# 1e-6, logarithms of scores 1.1e-5. A float16 model rounds between the operators of a layer, PyTorch's more often than
# the engine: 1.2e-3 and 1.8e-2, 1.5e-3, 2.4e-2. A number of an int8 cache is one step higher or lower where rounding
# decides between the two, and a step is 1/127 of the row's largest number; of an int4 cache one of 15 steps, of which
# most are 1/12 of it and the outermost ones 1/4.
LAYERS = {
    "float32": Tolerance(1e-5, 1e-5, 1e-4, 1e-4, 2.0**-22),
    "float16": Tolerance(3e-2, 1e-2, 1e-1, 1e-4, 2.0**-9),
    "int8": Tolerance(2e-2, 2e-2, 1e-1, 1e-4, 2.0**-9),
    "int4": Tolerance(2e-1, 2e-1, 5e-1, 1e-4, 2.0**-9),
    "k8v4": Tolerance(2e-1, 2e-1, 1e-1, 1e-4, 2.0**-9),
}
# Merges are float32 arithmetic whatever the type of the cache, and rounded to it once.
MERGES = {
    "float32": Tolerance(1e-5, 1e-5, 1e-4, 1e-4, 2.0**-22),
    "float16": Tolerance(2e-3, 2e-3, 1e-4, 1e-4, 2.0**-9),
    "int8": Tolerance(2e-2, 2e-2, 1e-4, 1e-4, 2.0**-9),
    "int4": Tolerance(2e-1, 2e-1, 1e-4, 1e-4, 2.0**-9),
    "k8v4": Tolerance(2e-1, 2e-1, 1e-4, 1e-4, 2.0**-9),
}

# Of the decoder as a whole, where a backend has no graph to cut: the first layer is held as above, a later one to what
# the layers before it make of rounding errors.
WHOLE = {
    "float32": Tolerance(1e-3, 1e-3, 1e-2, 1e-4, 2.0**-22),
    "float16": Tolerance(3e-1, 3e-1, 3e-1, 1e-4, 2.0**-9),
    "int8": Tolerance(3e-1, 3e-1, 3e-1, 1e-4, 2.0**-9),
    "int4": Tolerance(1.0, 1.0, 1.0, 1e-4, 2.0**-9),
    "k8v4": Tolerance(1.0, 1.0, 1.0, 1e-4, 2.0**-9),
}


def tolerance_of(table: Mapping[str, Tolerance], *types: str) -> Tolerance:
    """What `table` allows for the largest of these types' roundings, those of the model and of the cache."""
    found = [table[name] for name in types]
    return Tolerance(*(max(getattr(x, part.name) for x in found) for part in fields(Tolerance)))


@dataclass(frozen=True)
class Difference:
    """The largest difference of a tensor in terms of what is allowed. slot: of the cache, or of the call's tokens."""

    tensor: str
    difference: float
    allowed: float
    lane: int
    head: int | None
    slot: int

    def at(self, lane: int, head: int) -> Difference:
        """The same, of one lane and head that were cut out of more."""
        return replace(self, lane=lane, head=head)


def norm(x: Array) -> Array:
    """Of the last dimension, in float64."""
    return np.asarray(np.linalg.norm(x.astype(np.float64), axis=-1))


def worst(tensor: str, difference: Array, allowed: Array | float) -> Difference | None:
    """Where `difference` [B, ..., slots] exceeds `allowed` by most; None where it nowhere does. What is not finite
    exceeds everything."""
    difference = np.nan_to_num(difference, nan=np.inf)
    allowed = np.broadcast_to(allowed, difference.shape)
    if not (over := difference > allowed).any():
        return None
    size = np.where(over, difference / np.maximum(allowed, 1e-300), 0.0)
    at = np.unravel_index(int(size.argmax()), size.shape)
    head = int(at[1]) if len(at) > 2 else None
    return Difference(tensor, float(difference[at]), float(allowed[at]), int(at[0]), head, int(at[-1]))


def named_state(layer: LayerCache, state: Sequence[Array]) -> dict[str, Array]:
    """A layer's tensors by their names. Keys and values of a small cache as what they stand for, in float32; so without
    scales."""
    named = {tensor.name: x for tensor, x in zip(layer.state, state, strict=True)}
    if layer.dtype in SMALL:
        for name in ("key", "value"):
            named[name] = stored_rows(named[name], named.pop(f"{name}_scale"))
    return named


def state_difference(
    layer: LayerCache, method: Method, ours: Sequence[Array], theirs: Sequence[Array], tolerance: Tolerance
) -> Difference | None:
    """The first tensor of a layer's state [B, H, ...] that differs by more than `tolerance`: positions and what no
    operator computes exactly, keys and values by their norms, votes and scores by their sizes."""
    of_ours, of_theirs = named_state(layer, ours), named_state(layer, theirs)
    first = ("position", "votes", "key", "value", "score")
    for name in (*first, *(name for name in of_ours if name not in first)):
        a, b = of_ours[name], of_theirs[name]
        if np.array_equal(a, b):
            continue
        if found := _tensor_difference(name, method, a, b, tolerance):
            return found
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
            return _score_difference(method, gap, size, tolerance)
        return worst(name, gap.reshape(*gap.shape[:2], -1), 0.0 if name == "position" else tolerance.votes)


def _score_difference(method: Method, gap: Array, size: Array, tolerance: Tolerance) -> Difference | None:
    for k, statistic in enumerate(method.statistics):
        least = 1.0 if statistic.kind == "log_ema" else NO_SCORE / tolerance.scores
        off = np.where((size[:, :, k] > NOTHING_YET) & (gap[:, :, k] < NOTHING_YET * 1e-3), 0.0, gap[:, :, k])
        if found := worst("score", off, tolerance.scores * np.maximum(size[:, :, k], least)):
            return found
    return None


def largest_differences(name: str, a: Array, b: Array, heads: Array | None = None) -> float:
    """The largest difference of a state tensor [B, H, ...]: of keys and values relative to their norm, of the others
    absolute. heads [B, H] bool: those that count. What stands for ln(0) in both counts as equal."""
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
