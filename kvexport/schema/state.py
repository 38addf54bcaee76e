"""The tensors of a layer's cache: names, dimensions, types and meaning (docs/reference/contract.md, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

CONTRACT_VERSION = 8  # of docs/reference/contract.md
T = TypeVar("T")
DType = Literal["cache", "float32", "int32"]
# Every dimension by its letter: its name in C, and what it counts.
DIMENSIONS = {
    "B": ("batch", "lanes"),
    "Hq": ("query_heads", "query heads"),
    "H": ("heads", "KV heads"),
    "T": ("tokens", "new tokens"),
    "C": ("capacity", "slots, `budget + slack`"),
    "D": ("key_size", "size of a key"),
    "Dv": ("value_size", "size of a value"),
    "K": ("statistics", "statistics"),
}


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state; zeros are an empty cache.

    dims: letters of `DIMENSIONS`, or fixed sizes; the first is always B. A tensor that has a C, which then follows B
        and H, holds something for every slot: it is moved, zeroed and cut with the slots.
    dtype: ``cache`` is the type of the cache's keys and values.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: DType
    meaning: str

    def __post_init__(self) -> None:
        unknown = [d for d in self.dims if isinstance(d, str) and d not in DIMENSIONS]
        if self.dims[:1] != ("B",) or unknown or ("C" in self.dims and self.dims[:2] != ("B", "H")):
            raise ValueError(
                f"the state tensor {self.name} has the dimensions {self.dims}; the first is B, the letters are "
                f"{', '.join(DIMENSIONS)}, and a tensor of slots begins with B, H"
            )

    @property
    def slot_axis(self) -> int | None:
        """The dimension that counts slots, None where there is none."""
        return self.dims.index("C") if "C" in self.dims else None

    def shape(self, sizes: Mapping[str, T]) -> tuple[T | int, ...]:
        """Its shape where the letters stand for `sizes`."""
        return tuple(d if isinstance(d, int) else sizes[d] for d in self.dims)

    def stored_dtype(self, cache_type: str) -> str:
        """The type of its elements in a cache of this type; two numbers of int4 lie in a byte, the first in its low
        half."""
        if self.dtype != "cache":
            return self.dtype
        dtype = types_of(cache_type)[self.name]
        return "uint8" if dtype == "int4" else dtype

    def stored_shape(self, cache_type: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape in a cache of this type, where the letters stand for `sizes`."""
        *slots, size = self.shape(sizes)
        return (*slots, size // 2 if self.stored_dtype(cache_type) == "uint8" else size)

    def past(self, layer: int) -> str:
        """The graph's input of this tensor."""
        return f"past_key_values.{layer}.{self.name}"

    def present(self, layer: int) -> str:
        """The graph's output of this tensor."""
        return f"present.{layer}.{self.name}"


STATE = (
    StateTensor("key", ("B", "H", "C", "D"), "cache", "keys after RoPE"),
    StateTensor(
        "value",
        ("B", "H", "C", "Dv"),
        "cache",
        "values (mean-normalised: any factor that belongs to the numerator alone is folded in)",
    ),
    StateTensor(
        "votes",
        ("B", "H", "C"),
        "float32",
        "how many tokens a slot counts for, may be fractional; **0 = the slot is empty**",
    ),
    StateTensor(
        "score",
        ("B", "H", "K", "C"),
        "float32",
        "K importance statistics: the first selects, the last weighs; 1 for most methods, 2 where these differ",
    ),
    StateTensor("position", ("B", "H", "C"), "int32", "absolute position of the slot's latest token"),
)
# Of a small cache, whose keys and values are numbers of 8 or 4 bits.
SCALES = (
    StateTensor("key_scale", ("B", "H", "C"), "float32", "what a key's numbers are multiples of"),
    StateTensor("value_scale", ("B", "H", "C"), "float32", "what a value's numbers are multiples of"),
)
# Types of a small cache: that of its keys, and that of its values.
SMALL = {"int8": ("int8", "int8"), "int4": ("int4", "int4"), "k8v4": ("int8", "int4")}
# The int8 number that each of int4's sixteen codes stands for. A row that is rotated has nearly normal numbers, of
# which the largest is 127: these are the sixteen of the least mean square error (benchmarks/four_bits.py). Code 0 is 0,
# so that zeros are zeros.
INT4 = (0, 11, 22, 34, 46, 60, 77, 98, 127, -127, -94, -72, -54, -39, -25, -12)
# Of every byte the numbers that its two codes stand for.
PAIRS = tuple((INT4[byte & 15], INT4[byte >> 4]) for byte in range(256))


def types_of(cache_type: str) -> dict[str, str]:
    """The types of `key` and `value` in a cache of this type."""
    return dict(zip(("key", "value"), SMALL.get(cache_type, (cache_type, cache_type)), strict=True))


def scales_of(cache_type: str) -> tuple[StateTensor, ...]:
    """The state tensors that a cache of this type has beside the five."""
    return SCALES if cache_type in SMALL else ()


STATE_NAMES = tuple(tensor.name for tensor in STATE)
# The two of a method that keeps reference queries (`Fitting`), [B, H, rows, ...]: of each row a query, the latest last,
# and the tokens that it has seen, 0 where there is none yet.
RING = ("query", "query_seen")
