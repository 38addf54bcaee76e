"""The hook for complex numbers: a trace computes with pairs of real numbers instead.

The rotary embeddings of DeepSeek V2 and Llama 4 rotate queries and keys by a product of complex numbers, which ONNX
operators do not support. `complex_as_pairs` replaces the PyTorch functions that create complex numbers by functions
that create `Pairs`, which are pairs of real numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Pairs:
    def __init__(self, parts: Tensor) -> None:
        self.parts = parts

    @property
    def device(self) -> torch.device:
        return self.parts.device

    def __mul__(self, other: Pairs | float) -> Pairs:
        if not isinstance(other, Pairs):
            return Pairs(self.parts * other)
        (a, b), (c, d) = self.parts.unbind(-1), other.parts.unbind(-1)
        return Pairs(torch.stack([a * c - b * d, a * d + b * c], -1))

    def __getitem__(self, index: tuple[Any, ...]) -> Pairs:
        position: tuple[Any, ...] = (*index, slice(None))
        return Pairs(self.parts[position])

    def unsqueeze(self, dim: int) -> Pairs:
        return Pairs(self.parts.unsqueeze(dim if dim >= 0 else dim - 1))

    def to(self, device: Any) -> Pairs:
        return Pairs(self.parts.to(device))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "polar": lambda size, angle: Pairs(torch.stack([size * angle.cos(), size * angle.sin()], -1)),
    "view_as_complex": Pairs,
    "view_as_real": lambda x: x.parts,
}


@contextlib.contextmanager
def complex_as_pairs() -> Iterator[None]:
    own = {name: getattr(torch, name) for name in FUNCTIONS}
    try:
        for name, function in FUNCTIONS.items():
            setattr(torch, name, function)
        yield
    finally:
        for name, function in own.items():
            setattr(torch, name, function)
