"""The tensors of a layer's cache: names, dimensions, types, and what they hold (docs/contract.md, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

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
        and H, holds something for every slot: it is sorted, zeroed and cut with the slots.
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
# Of a cache whose keys and values are int8.
SCALES = (
    StateTensor("key_scale", ("B", "H", "C"), "float32", "what a key's numbers are multiples of"),
    StateTensor("value_scale", ("B", "H", "C"), "float32", "what a value's numbers are multiples of"),
)
SMALL = ("int8",)  # types of keys and values that go with scales


def scales_of(dtype: str) -> tuple[StateTensor, ...]:
    """The state tensors that a cache of this type of keys and values has beside the five."""
    return SCALES if dtype in SMALL else ()


STATE_NAMES = tuple(tensor.name for tensor in STATE)
