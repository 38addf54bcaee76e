"""The KV cache plan: names, shapes, types and bytes of every state tensor (docs/reference/contract.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvexport.methods.slots import Rotary
from kvexport.schema.state import PAIRS, ROTARY_OFFSET, STATE, StateTensor

T = TypeVar("T")


@dataclass(frozen=True)
class LayerGeometry:
    query_heads: int
    kv_heads: int
    key_size: int  # size of a key in elements
    value_size: int  # size of a value in elements
    sliding_window: int = 0  # model's sliding window in positions; 0 if every position is visible
    softcap: float = 0.0  # bound of logits; 0 for none
    scale: float = 1.0  # factor of the products of queries and keys
    sink_logits: bool = False  # whether each head has a learned logit without a value
    value_in_key: bool = False  # whether a value is the first numbers of its key, as a latent is
    position_in_key: bool = False  # whether the last numbers of a key are its position (ALiBi)
    most_picked: int = 0  # number of tokens up to which the layer's indexer picks all; 0 without an indexer
    chunk: int = 0  # positions in each of the chunks in which the layer attends; 0 if it does not
    # Rotary embedding, read only for methods that rotate keys and for positions in the cache
    rotary: Rotary = field(default_factory=Rotary)
    key_shift: Rotary | None = None  # read only for a quantized cache: see `LayerCache.key_shift`


@dataclass(frozen=True)
class LayerCache:
    """The plan of the KV cache of one layer, whose KV heads may have budgets of their own."""

    key_size: int  # size of a key in elements
    value_size: int  # size of a value in elements
    statistics: int
    budget: tuple[int, ...]  # for each KV head, the slots that remain after a merge
    capacity: tuple[int, ...]  # for each KV head, the slots that are allocated; the slack is capacity - budget
    sinks: int  # number of first positions that are never evicted
    recent: tuple[int, ...]  # for each KV head, the number of latest positions that are never evicted
    sliding_window: int  # model's sliding window in positions; 0 for none
    merges: bool  # False if all budgets are the longest sequence, so that nothing is ever evicted
    dtype: str  # type of keys and values: that of the model, or of a quantized cache
    rotary: Rotary = field(default_factory=Rotary)  # layer's rotary embedding
    # State tensors in addition to the contract's five: the scales of a quantized cache, then those of the method
    extra: tuple[StateTensor, ...] = ()
    # Whether values are read from the keys, whose first numbers they are. The state tensor `value` then has rows of
    # size 0.
    value_in_key: bool = False
    # The rotary embedding by which the bias of the key projection is rotated before it is taken off the keys, or None
    # if keys are stored with it (kvexport/export/hooks/key_shift.py)
    key_shift: Rotary | None = None

    @property
    def kv_heads(self) -> int:
        return len(self.capacity)

    @property
    def slots(self) -> int:
        return sum(self.capacity)

    @property
    def head_slots(self) -> list[slice]:
        return slots_of(self.capacity)

    def of_head(self, tensor: StateTensor, x: NDArray[Any], head: int) -> NDArray[Any]:
        """Return the view [B, 1, C, ...] of one KV head's slots in a state tensor; [B, 1, K, C] for `score`."""
        if tensor.slot_axis is None:
            return x[:, head : head + 1]
        slots = np.moveaxis(x, tensor.slot_axis, 0)[self.head_slots[head]]
        return np.moveaxis(slots, 0, tensor.slot_axis)[:, None]

    def first_slots(self, most: int) -> tuple[int, ...]:
        """Return how many slots of each KV head are saved with a sequence: `most`, or all if a head has fewer slots."""
        return tuple(min(most, capacity) for capacity in self.capacity)

    def most_of(self, slots: int) -> int:
        """Return the argument with which the result of `first_slots` sums to `slots`, or -1 if no argument does."""
        most = next((n for n in range(max(self.capacity) + 1) if sum(self.first_slots(n)) >= slots), -1)
        return most if most >= 0 and sum(self.first_slots(most)) == slots else -1

    @property
    def value_prefix(self) -> int:
        return self.value_size if self.value_in_key else 0

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return (*STATE, *self.extra)

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        sizes = {
            "B": batch,
            "H": self.kv_heads,
            "S": self.slots,
            "K": self.statistics,
            "D": self.key_size,
            "Dv": 0 if self.value_in_key else self.value_size,
        }
        return {tensor.name: tensor.stored_shape(self.dtype, sizes) for tensor in self.state}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {tensor.name: np.dtype(tensor.stored_dtype(self.dtype)) for tensor in self.state}

    def bytes(self, batch: int = 1) -> int:
        dtypes = self.dtypes()
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in self.shapes(batch).items())

    def slot_bytes(self) -> int:
        shapes, dtypes = self.shapes(1), self.dtypes()
        return self.kv_heads * sum(shapes[name][-1] * dtypes[name].itemsize for name in ("key", "value"))


@dataclass(frozen=True)
class LayerStates:
    """The recurrent state of one layer: the last inputs of its convolution, and the state of its linear attention.

    The state has the same size after any number of tokens, and no slots. Zeros are the state before the first token.
    """

    layer: int  # number of the layer in the model
    state: tuple[StateTensor, ...]  # tensors; their dimensions after the batch are fixed sizes

    @property
    def merges(self) -> bool:
        return False

    @property
    def place(self) -> str:
        return f"layer.{self.layer}"

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape({"B": batch}) for tensor in self.state}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {tensor.name: np.dtype(tensor.dtype) for tensor in self.state}

    def bytes(self, batch: int = 1) -> int:
        dtypes = self.dtypes()
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in self.shapes(batch).items())


@dataclass(frozen=True)
class CachePlan:
    caches: tuple[LayerCache, ...]  # one cache for each layer that attends
    # Numbers of the model's layers that have caches of their own; empty if every layer has one
    attention_layers: tuple[int, ...] = ()
    states: tuple[LayerStates, ...] = ()  # recurrent state of each layer that has one

    def cache_of(self, layer: int) -> int:
        return self.attention_layers.index(layer) if self.attention_layers else layer

    @property
    def cache_positions(self) -> bool:
        """Whether RoPE rotates keys by index in the cache, not token position; heads then hold equally many entries."""
        return any(cache.rotary.cache_positions for cache in self.caches)

    @property
    def rotary_offset(self) -> bool:
        """Whether images have rotary positions by rows and columns, so that positions differ from token indices."""
        return any(ROTARY_OFFSET in layer.state for layer in self.states)

    def with_rotary_offset(self) -> CachePlan:
        return replace(self, states=(*self.states, LayerStates(0, (ROTARY_OFFSET,))))

    def heads(self, name: str) -> NDArray[np.int64]:
        return np.array([x for cache in self.caches for x in getattr(cache, name)], np.int64)

    def by_layer(self, heads: Sequence[T]) -> list[Sequence[T]]:
        ends = [0, *itertools.accumulate(cache.kv_heads for cache in self.caches)]
        return [heads[first:end] for first, end in itertools.pairwise(ends)]

    def bytes(self, batch: int = 1) -> int:
        recurrent = sum(layer.bytes(batch) for layer in self.states)
        return sum(layer.bytes(batch) for layer in self.caches) + recurrent + 8 * batch

    def state_names(self) -> Iterator[tuple[str, str, LayerCache | LayerStates, str]]:
        """Yield the input name, output name, cache and tensor name of every state tensor, recurrent states last."""
        places: Iterator[tuple[int | str, LayerCache | LayerStates]] = itertools.chain(
            enumerate(self.caches), ((states.place, states) for states in self.states)
        )
        for place, layer in places:
            for tensor in layer.state:
                yield tensor.past(place), tensor.present(place), layer, tensor.name

    def to_json(self) -> list[dict[str, Any]]:
        """Return the plan as JSON for the manifest; `value_in_key` and `key_shift` appear only if they are set."""
        layers = [asdict(layer) for layer in self.caches]
        return [{k: x for k, x in layer.items() if k not in ("value_in_key", "key_shift") or x} for layer in layers]

    def recurrent_json(self) -> dict[str, Any]:
        if not self.attention_layers and not self.states:
            return {}
        states = [asdict(layer) for layer in self.states]
        return {"recurrent": {"attention_layers": self.attention_layers, "states": states}}


def slots_of(capacity: Sequence[int]) -> list[slice]:
    return [slice(first, end) for first, end in itertools.pairwise((0, *itertools.accumulate(capacity)))]


def resized(x: NDArray[Any], axis: int, before: Sequence[int], after: Sequence[int]) -> NDArray[Any]:
    """Return a state tensor with other numbers of slots for its KV heads: cut at the end, or filled with zeros."""
    if tuple(before) == tuple(after):
        return x
    result = np.zeros((*x.shape[:axis], sum(after), *x.shape[axis + 1 :]), x.dtype)
    old, new = np.moveaxis(x, axis, 0), np.moveaxis(result, axis, 0)
    for source, target in zip(slots_of(before), slots_of(after), strict=True):
        count = min(source.stop - source.start, target.stop - target.start)
        new[target.start : target.start + count] = old[source.start : source.start + count]
    return result


def stored_rows(stored: NDArray[Any], scale: NDArray[Any] | None) -> NDArray[np.float32]:
    """Return stored keys or values as float32; keys and values of an 8-bit or 4-bit cache stay Hadamard-rotated."""
    if scale is None:
        return stored.astype(np.float32)
    if stored.dtype == np.uint8:
        stored = np.array(PAIRS, np.int8)[stored].reshape(*stored.shape[:-1], -1)
    return stored.astype(np.float32) * scale[..., None].astype(np.float32)
