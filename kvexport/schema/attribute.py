"""The description of an attribute of kvexport's ONNX operators: its name, type, default, range and meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["float", "int", "bool", "word", "words", "floats", "ints"]


@dataclass(frozen=True)
class Attribute:
    """One attribute of an ONNX operator of kvexport. For a list, the bounds hold for every number of the list."""

    name: str
    # A bool is an ONNX integer, 0 or 1. "words" is one string with commas, because ONNX Runtime does not pass lists of
    # strings to custom operators.
    kind: Kind
    meaning: str  # for tables and generated comments
    default: Any = None  # None if a node must have the attribute
    words: tuple[str, ...] = ()  # the allowed words
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    optional: bool = False  # whether a node may omit it, which has a meaning that differs from every value

    @property
    def bounds(self) -> str:
        """The allowed range of an ONNX attribute's value in words, for errors and tables; empty without bounds."""
        low = f"at least {_number(self.least)}" if self.least is not None else ""
        low = f"above {_number(self.above)}" if self.above is not None else low
        high = f"at most {_number(self.most)}" if self.most is not None else ""
        high = f"below {_number(self.below)}" if self.below is not None else high
        return " and ".join(bound for bound in (low, high) if bound)

    def problem(self, value: Any) -> str:
        """Return why an ONNX attribute cannot have `value`; an empty string if it can."""
        if self.kind in ("word", "words"):
            words = [value] if self.kind == "word" else value.split(",") if isinstance(value, str) else list(value)
            unknown = [word for word in words if word not in self.words]
            return f"{self.name} is '{unknown[0]}'; known: {', '.join(self.words)}" if unknown else ""
        for x in value if self.kind in ("floats", "ints") else [value]:
            if not self._inside(x):
                return f"{self.name} is {_number(x)}, and has to be {self.bounds or 'a number'}"
        return ""

    def _inside(self, x: float) -> bool:
        return (
            not math.isnan(x)
            and (self.least is None or x >= self.least)
            and (self.most is None or x <= self.most)
            and (self.above is None or x > self.above)
            and (self.below is None or x < self.below)
        )

    def node_value(self, value: Any) -> Any:
        if self.kind == "words":
            return value if isinstance(value, str) else ",".join(value)
        if self.kind == "floats":
            return [float(x) for x in value]
        if self.kind == "ints":
            return [int(x) for x in value]
        return {"float": float, "int": int, "bool": int, "word": str}[self.kind](value)


def _number(x: float | None) -> str:
    return f"{x:g}" if isinstance(x, float) else str(x)
