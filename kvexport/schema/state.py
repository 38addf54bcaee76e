"""The tensors of a layer's KV cache: names, dimensions, types and contents (docs/reference/contract.md, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

CONTRACT_VERSION = 11  # the version of docs/reference/contract.md
T = TypeVar("T")
DType = Literal["cache", "float32", "float16", "int32"]
# Every dimension by its letter: its name in C, and the things that it counts.
DIMENSIONS = {
    "B": ("batch", "lanes"),
    "Hq": ("query_heads", "query heads"),
    "H": ("heads", "KV heads"),
    "T": ("tokens", "new tokens"),
    "S": ("slots", "slots of all KV heads, those of one head after those of another"),
    "D": ("key_size", "size of a key"),
    "Dv": ("value_size", "size of a value"),
    "K": ("statistics", "statistics"),
}


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's KV cache, such as its keys or positions; zeros are an empty cache."""

    name: str
    # Letters of `DIMENSIONS`, or fixed sizes; the first is always B. A tensor with the letter S has one element or row
    # for every slot, those of one KV head after those of another. It is moved, zeroed and cut with the slots. It has no
    # dimension H.
    dims: tuple[str | int, ...]
    dtype: DType  # type; ``cache`` is the type of the cache's keys and values
    meaning: str  # A description for tables

    def __post_init__(self) -> None:
        unknown = [d for d in self.dims if isinstance(d, str) and d not in DIMENSIONS]
        if self.dims[:1] != ("B",) or unknown or {"H", "S"} <= {*self.dims}:
            raise ValueError(
                f"the state tensor {self.name} has the dimensions {self.dims}; the first has to be B, the letters are "
                f"{', '.join(DIMENSIONS)}, and a tensor with S has no H, because S counts the slots of all KV heads"
            )

    @property
    def slot_axis(self) -> int | None:
        return self.dims.index("S") if "S" in self.dims else None

    def shape(self, sizes: Mapping[str, T]) -> tuple[T | int, ...]:
        return tuple(d if isinstance(d, int) else sizes[d] for d in self.dims)

    def stored_dtype(self, cache_type: str) -> str:
        """Return the type of a state tensor's elements in a cache of type `cache_type`.

        In an int4 cache a byte stores two 4-bit codes, the first in the low half of the byte.
        """
        if self.dtype != "cache":
            return self.dtype
        dtype = types_of(cache_type)[self.name]
        return "uint8" if dtype == "int4" else dtype

    def stored_shape(self, cache_type: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        *slots, size = self.shape(sizes)
        return (*slots, size // 2 if self.stored_dtype(cache_type) == "uint8" else size)

    def past(self, layer: int | str) -> str:
        return f"past_key_values.{layer}.{self.name}"

    def present(self, layer: int | str) -> str:
        return f"present.{layer}.{self.name}"


STATE = (
    StateTensor("key", ("B", "S", "D"), "cache", "keys after RoPE"),
    StateTensor(
        "value",
        ("B", "S", "Dv"),
        "cache",
        "values (mean-normalised: any factor that belongs to the numerator alone is folded in)",
    ),
    StateTensor(
        "votes",
        ("B", "S"),
        "float32",
        "the number of tokens that a slot stands for, possibly a fraction; **0 = the slot is empty**",
    ),
    StateTensor(
        "score",
        ("B", "K", "S"),
        "float32",
        "K importance statistics: the first ranks slots for eviction, the last weights merges; most methods have 1, "
        "methods where these differ have 2",
    ),
    StateTensor("position", ("B", "S"), "int32", "absolute position of the slot's latest token"),
)
# The additional tensors of a quantized cache, whose keys and values are numbers of 8 or 4 bits.
SCALES = (
    StateTensor("key_scale", ("B", "S"), "float32", "the factor of a key's numbers"),
    StateTensor("value_scale", ("B", "S"), "float32", "the factor of a value's numbers"),
)
# The types of a quantized cache: that of its keys, and that of its values.
SMALL = {"int8": ("int8", "int8"), "int4": ("int4", "int4"), "k8v4": ("int8", "int4")}
TYPES = ("float32", "float16", *SMALL)  # of queries and caches, in the order of their numbers in plugins/abi/kvexport.h
# The int8 number that each of int4's sixteen codes stands for. A rotated row has nearly normal numbers, the largest of
# which is 127. These sixteen numbers give the least mean square error (docs/measurements/quantized-cache.md). Code 0 is
# the number 0, so that zeros stay zeros.
INT4 = (0, 11, 22, 34, 46, 60, 77, 98, 127, -127, -94, -72, -54, -39, -25, -12)
# For every byte, the two numbers that its codes stand for.
PAIRS = tuple((INT4[byte & 15], INT4[byte >> 4]) for byte in range(256))


def types_of(cache_type: str) -> dict[str, str]:
    return dict(zip(("key", "value"), SMALL.get(cache_type, (cache_type, cache_type)), strict=True))


def scales_of(cache_type: str) -> tuple[StateTensor, ...]:
    """Return the state tensors for the scales of cached keys and values; empty if the cache is not quantized."""
    return SCALES if cache_type in SMALL else ()


# The state of a decoder whose images have rotary positions of rows and columns (M-RoPE), stored with layer 0.
ROTARY_OFFSET = StateTensor(
    "rotary_offset", ("B", 1), "int32", "the next token's rotary position less its index; images make it smaller"
)
STATE_NAMES = tuple(tensor.name for tensor in STATE)
# The two state tensors of a method with reference queries (`Fitting`), [B, H, rows, ...]: the queries, the latest last,
# and the number of tokens that each has seen, 0 for a row without a query.
RING = ("query", "query_seen")
