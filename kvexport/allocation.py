"""How the budget is shared out: the slots of every layer's cache, or of every KV head's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvexport.errors import UsageError
from kvexport.recipe.fields import Recipe


def allocate(recipe: Recipe, layers: int) -> list[int]:
    """Slots of every cache, on average `recipe.budget`; a layer has one cache, or one for each KV head where their
    shares are listed. cosine: ``m_l = (1-d)(cos(pi l / L) + 1)/2 + d`` (KeepKV); pyramid: linear, ``m_l = 1 - (1-d) l /
    (L-1)`` (PyramidKV); both scaled; listed: see `_listed`. Whole layers have `limits.max_length`, and the others share
    what these leave. Raises UsageError where that is nothing, the model lacks such a layer, or shares are not those of
    its layers."""
    method = recipe.cache.build_method()
    allocation = recipe.cache.allocation
    if not method.compresses:
        return [recipe.budget] * layers
    kind, d = allocation.kind or method.allocation, allocation.minimum
    if kind == "listed" and len(allocation.shares) != layers:
        raise UsageError(
            f"cache.allocation.shares has {len(allocation.shares)} numbers, the model has {layers} layers",
            "one for each layer, or --set cache.allocation.kind=uniform",
        )
    of_layer = [i for i, row in enumerate(head_shares(recipe)) for _ in row] or list(range(layers))
    left = _left_by_whole_layers(recipe, of_layer)
    if kind == "uniform":
        raw = [1.0] * layers
    elif kind == "cosine":
        raw = [(1 - d) * (math.cos(math.pi * i / layers) + 1) / 2 + d for i in range(layers)]
    elif kind == "pyramid":
        raw = [1 - (1 - d) * i / max(layers - 1, 1) for i in range(layers)]
    else:
        raw = _listed(recipe, of_layer, left)
    whole = [layer in allocation.whole for layer in of_layer]
    raw = [0.0 if all_of_it else share for all_of_it, share in zip(whole, raw, strict=True)]
    scale = left / sum(raw) if any(raw) else 0.0
    # Rounding the running sum keeps the total exact.
    edges = [round(scale * sum(raw[:i])) for i in range(len(raw) + 1)]
    shares = [b - a for a, b in itertools.pairwise(edges)]
    return [recipe.limits.max_length if all_of_it else share for all_of_it, share in zip(whole, shares, strict=True)]


def _listed(recipe: Recipe, of_layer: Sequence[int], left: int) -> list[float]:
    """Slots by `cache.allocation.shares` of the caches whose layers are not whole, `left` in all, each between what
    holds its sinks, recent slots and two more, and `limits.max_length`. of_layer: the layer of every cache."""
    allocation = recipe.cache.allocation
    shares = [share for row in allocation.shares for share in (row if isinstance(row, list) else [row])]
    others = [share for layer, share in zip(of_layer, shares, strict=True) if layer not in allocation.whole]
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
    """What holds the sinks, the recent slots and two more."""
    protected, recent = recipe.cache.sinks + 2, recipe.cache.recent
    return protected / (1 - recent) if isinstance(recent, float) and recent < 1 else protected + recent


def _left_by_whole_layers(recipe: Recipe, of_layer: Sequence[int]) -> int:
    """Slots of all caches together that are not those of whole layers. of_layer: the layer of every cache."""
    whole, length, layers = recipe.cache.allocation.whole, recipe.limits.max_length, of_layer[-1] + 1
    if whole and whole[-1] >= layers:
        raise UsageError(
            f"cache.allocation.whole names layer {whole[-1]}, the model has 0 to {layers - 1}",
            f"--set cache.allocation.whole={[layer for layer in whole if layer < layers]}",
        )
    slots, kept = recipe.budget * len(of_layer), sum(layer in whole for layer in of_layer)
    least = kept * length + (len(of_layer) - kept) * (recipe.cache.sinks + 1)
    if whole and slots < least:
        raise UsageError(
            f"{len(whole)} whole layers of limits.max_length {length} slots take {kept * length} of the "
            f"{slots} that {layers} layers have at a budget of {recipe.budget}, which leaves too few for the others",
            f"--set cache.budget={-(-least // len(of_layer))}, or fewer layers in cache.allocation.whole",
        )
    return slots - kept * length


def head_shares(recipe: Recipe) -> list[list[float]]:
    """`cache.allocation.shares` of KV heads, layer by layer; nothing where layers have one budget for all of them."""
    allocation, method = recipe.cache.allocation, recipe.cache.build_method()
    listed = method.compresses and (allocation.kind or method.allocation) == "listed"
    return [row for row in allocation.shares if isinstance(row, list)] if listed else []
