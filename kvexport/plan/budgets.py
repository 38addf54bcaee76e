"""The allocation of the KV cache's budget, a number of slots, to layers and KV heads."""

import itertools
import math
from collections.abc import Sequence

from kvexport.errors import UsageError
from kvexport.recipe.fields import Recipe


def allocate(recipe: Recipe, layers: int) -> list[int]:
    """Return the budget of every KV cache in slots; the mean of the budgets is the recipe's budget.

    A layer has one cache, or one for each KV head if the recipe lists shares of heads. Budgets are proportional to
    shares. With `cache.allocation.kind: cosine` (KeepKV) the share of layer l of L is ``(1-d)(cos(pi l / L) + 1)/2 +
    d``, where d is `cache.allocation.minimum`. With `pyramid` (PyramidKV) it is ``1 - (1-d) l / (L-1)``. With `listed`
    the shares are `cache.allocation.shares`. Whole layers, which evict nothing, have `limits.max_length` slots, and the
    other layers share the rest.
    """
    method = recipe.cache.build_method()
    allocation = recipe.cache.allocation
    if not method.compresses:
        return [recipe.budget] * layers
    kind, d = allocation.kind or method.allocation, allocation.minimum
    if kind == "listed" and len(allocation.shares) != layers:
        raise UsageError(
            f"cache.allocation.shares has {len(allocation.shares)} lists, the model has {layers} layers",
            "one for each layer, or --set cache.allocation.kind=uniform",
        )
    layer_numbers = [i for i, row in enumerate(head_shares(recipe)) for _ in row] or list(range(layers))
    left = _left_by_whole_layers(recipe, layer_numbers)
    if kind == "uniform":
        raw = [1.0] * layers
    elif kind == "cosine":
        raw = [(1 - d) * (math.cos(math.pi * i / layers) + 1) / 2 + d for i in range(layers)]
    elif kind == "pyramid":
        raw = [1 - (1 - d) * i / max(layers - 1, 1) for i in range(layers)]
    else:
        raw = _listed(recipe, layer_numbers, left)
    whole = [layer in allocation.whole for layer in layer_numbers]
    raw = [0.0 if is_whole else share for is_whole, share in zip(whole, raw, strict=True)]
    scale = left / sum(raw) if any(raw) else 0.0
    # Rounding the running sum keeps the total exact.
    edges = [round(scale * sum(raw[:i])) for i in range(len(raw) + 1)]
    shares = [b - a for a, b in itertools.pairwise(edges)]
    return [recipe.limits.max_length if is_whole else share for is_whole, share in zip(whole, shares, strict=True)]


def _listed(recipe: Recipe, layer_numbers: Sequence[int], left: int) -> list[float]:
    """Return budgets proportional to the shares that the recipe lists, from `least_slots` to `limits.max_length`."""
    allocation = recipe.cache.allocation
    shares = [share for row in allocation.shares for share in row]
    others = [share for layer, share in zip(layer_numbers, shares, strict=True) if layer not in allocation.whole]
    most, least = recipe.limits.max_length, least_slots(recipe)
    if not len(others) * least < left < len(others) * most:
        return [left / max(len(others), 1)] * len(shares)
    low, high = 0.0, most / min(others)
    for _ in range(100):
        scale = (low + high) / 2
        enough = sum(min(max(scale * share, least), most) for share in others) >= left
        low, high = (low, scale) if enough else (scale, high)
    return [min(max(high * share, least), most) for share in shares]


def least_slots(recipe: Recipe) -> float:
    """Return the smallest allowed budget in cache slots: sinks (first positions), recent slots and two more."""
    protected, recent = recipe.cache.sinks + 2, recipe.cache.recent
    return protected / (1 - recent) if isinstance(recent, float) and recent < 1 else protected + recent


def _left_by_whole_layers(recipe: Recipe, layer_numbers: Sequence[int]) -> int:
    whole, length, layers = recipe.cache.allocation.whole, recipe.limits.max_length, layer_numbers[-1] + 1
    if whole and whole[-1] >= layers:
        raise UsageError(
            f"cache.allocation.whole names layer {whole[-1]}, the model has 0 to {layers - 1}",
            f"--set cache.allocation.whole={[layer for layer in whole if layer < layers]}",
        )
    slots, kept = recipe.budget * len(layer_numbers), sum(layer in whole for layer in layer_numbers)
    least = kept * length + (len(layer_numbers) - kept) * (recipe.cache.sinks + 1)
    if whole and slots < least:
        raise UsageError(
            f"{len(whole)} whole layers of limits.max_length {length} slots take {kept * length} of the "
            f"{slots} that {layers} layers have at a budget of {recipe.budget}, which leaves too few for the others",
            f"--set cache.budget={-(-least // len(layer_numbers))}, or fewer layers in cache.allocation.whole",
        )
    return slots - kept * length


def head_shares(recipe: Recipe) -> list[list[float]]:
    allocation, method = recipe.cache.allocation, recipe.cache.build_method()
    listed = method.compresses and (allocation.kind or method.allocation) == "listed"
    return allocation.shares if listed else []
