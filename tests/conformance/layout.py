"""A layer's state, in which the slots of its KV heads lie one after another, and the same state as tensors of heads.

The oracle and the cases have tensors [B, H, C, ...] of heads of one capacity. A layer whose heads differ is a list of
them, here called parts: one for each head. This module is written only from docs/reference/contract.md.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Sizes = list[tuple[int, int]]  # for each part, its KV heads and the slots of each
NEW = {"query": 1, "key": 1, "value": 1, "sink_logits": 0}  # the dimension of new tokens that counts heads
RING = ("query", "query_seen")  # state tensors of heads that have no slots


def flattened(name: str, x: np.ndarray) -> np.ndarray:
    """Return a state tensor [B, H, C, ...] (a score [B, H, K, C]) in the layout of a layer's state."""
    if name in RING:
        return x
    x = x.swapaxes(1, 2) if name == "score" else x
    before = 2 if name == "score" else 1
    slots = x.shape[before] * x.shape[before + 1]
    return np.ascontiguousarray(x).reshape(*x.shape[:before], slots, *x.shape[before + 2 :])


def of_heads(name: str, x: np.ndarray, heads: int) -> np.ndarray:
    """Return a state tensor of heads of one capacity as [B, H, C, ...]: the reverse of `flattened`."""
    if name in RING:
        return x
    before = 2 if name == "score" else 1
    view = x.reshape(*x.shape[:before], heads, x.shape[before] // heads, *x.shape[before + 1 :])
    return np.ascontiguousarray(view.swapaxes(1, 2)) if name == "score" else view


def joined(parts: Sequence[Arrays], prefix: str = "") -> tuple[Arrays, Sizes]:
    result: Arrays = {}
    for name, first in parts[0].items():
        of_state, each = name.startswith(prefix), [part[name] for part in parts]
        plain = name.removeprefix(prefix)
        if of_state:
            each = [flattened(plain, x) for x in each]
            result[name] = each[0] if len(each) == 1 else np.concatenate(each, 2 if plain == "score" else 1)
        elif name in NEW and len(parts) > 1:
            result[name] = np.concatenate(each, NEW[name])
        else:
            result[name] = first
    return result, [part[f"{prefix}votes"].shape[1:] for part in parts]


def capacity_of(sizes: Sizes) -> list[int]:
    return [slots for heads, slots in sizes for _ in range(heads)]


def apart(result: Arrays, sizes: Sizes) -> list[Arrays]:
    """Return the outputs of the parts from those of an operator."""
    heads = [count for count, _ in sizes]
    slots = np.cumsum([count * own for count, own in sizes])[:-1]
    parts: list[Arrays] = [{} for _ in sizes]
    for name, x in result.items():
        plain = name.removeprefix("present_")
        if name == "output":
            group = x.shape[1] // sum(heads)
            each = np.split(x, group * np.cumsum(heads)[:-1], 1)
        elif plain in RING:
            each = np.split(x, np.cumsum(heads)[:-1], 1)
        else:
            own_slots = np.split(x, slots, 2 if plain == "score" else 1)
            each = [of_heads(plain, y, count) for y, count in zip(own_slots, heads, strict=True)]
        for part, own in zip(parts, each, strict=True):
            part[name] = own
    return parts


class OfHeads:
    """Both operators over tensors of heads, by a class that has them over a layer's state."""

    layer_vote_attention: Any
    layer_merge_cache: Any

    def vote_attention(self, inputs: Arrays, attributes: Any, **options: Any) -> Arrays:
        return self.vote_attention_of([inputs], attributes, **options)[0]

    def vote_attention_of(self, parts: Sequence[Arrays], attributes: Any, **options: Any) -> list[Arrays]:
        """Return the outputs of parts whose heads may have different capacities, from one call."""
        inputs, sizes = joined(parts, "past_")
        return apart(self.layer_vote_attention(inputs, attributes, capacity_of(sizes), **options), sizes)

    def merge_cache(self, state: Arrays, attributes: Any, **options: Any) -> Arrays:
        return self.merge_cache_of([state], [attributes], **options)[0]

    def merge_cache_of(self, parts: Sequence[Arrays], attributes: Sequence[Any], **options: Any) -> list[Arrays]:
        """Return the present state of parts, each with attributes of its own, from one call."""
        state, sizes = joined(parts)
        every = [own for own, (heads, _) in zip(attributes, sizes, strict=True) for _ in range(heads)]
        return apart(self.layer_merge_cache(state, every, capacity_of(sizes), **options), sizes)
