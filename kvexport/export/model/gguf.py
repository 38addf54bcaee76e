"""GGUF version 3, as far as the checkpoints of `kvexport.export.model.wheel` need it: metadata, and tensors as float32.

Source of the format and of the block layouts: ggml's docs/gguf.md and ggml-quants.c.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32


@dataclass(frozen=True)
class Gguf:
    """metadata: by key. tensors: by name, float32, row-major: a product's [outputs, inputs]."""

    metadata: dict[str, Any]
    tensors: dict[str, NDArray[np.float32]]


def read_gguf(data: bytes) -> Gguf:
    """The whole of a file. Raises UsageError where it is no GGUF of version 3, ends early, or holds another tensor type
    than F32, F16, Q8_0 and Q4_1."""
    cursor = _Cursor(data)
    try:
        magic, version, tensor_count, entry_count = cursor.take("<4sIQQ")
        if (magic, version) != (b"GGUF", 3):
            raise UsageError(f"this is no GGUF file of version 3: it begins with {data[:8]!r}")
        metadata = {}
        for _ in range(entry_count):
            key = cursor.string()
            metadata[key] = cursor.value(*cursor.take("<I"))
        described = []
        for _ in range(tensor_count):
            name = cursor.string()
            dims = cursor.take(f"<{cursor.take('<I')[0]}Q")
            described.append((name, dims[::-1], *cursor.take("<IQ")))
    except struct.error as error:
        raise UsageError(f"the GGUF file ends early, at byte {cursor.at} of {len(data)}") from error
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return Gguf(metadata, {name: _tensor(data, name, dims, kind, start + at) for name, dims, kind, at in described})


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        (text,) = self.take(f"<{length}s")
        return str(text, "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.take("<IQ")
            return list(self.take(f"<{count}{_SCALARS[item]}")) if item in _SCALARS else self._values(item, count)
        if kind not in _SCALARS:
            raise UsageError(f"the GGUF file has a value of the unknown type {kind} at byte {self.at}")
        return self.take(f"<{_SCALARS[kind]}")[0]

    def _values(self, kind: int, count: int) -> list[Any]:
        return [self.value(kind) for _ in range(count)]


def _q8_0(block: NDArray[Any]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = block["scale"].astype(np.float32)[:, None] * block["levels"]
    return scaled


def _q4_1(block: NDArray[Any]) -> NDArray[np.float32]:
    """The low halves of the bytes are the block's first 16 values."""
    levels = np.concatenate([block["levels"] & 15, block["levels"] >> 4], axis=1)
    least = block["least"].astype(np.float32)[:, None]
    scaled: NDArray[np.float32] = block["scale"].astype(np.float32)[:, None] * levels + least
    return scaled


# ggml's number of a type -> what a block of so many values is made of, and their values
_TYPES: dict[int, tuple[int, np.dtype[Any], Callable[[NDArray[Any]], NDArray[np.float32]]]] = {
    0: (1, np.dtype("<f4"), lambda block: block),
    1: (1, np.dtype("<f2"), lambda block: block.astype(np.float32)),
    3: (_BLOCK, np.dtype([("scale", "<f2"), ("least", "<f2"), ("levels", "u1", 16)]), _q4_1),
    8: (_BLOCK, np.dtype([("scale", "<f2"), ("levels", "i1", 32)]), _q8_0),
}


def _tensor(data: bytes, name: str, shape: tuple[int, ...], kind: int, start: int) -> NDArray[np.float32]:
    if kind not in _TYPES:
        raise UsageError(f"tensor {name} of the GGUF file has ggml's type {kind}, expected F32, F16, Q8_0 or Q4_1")
    size, layout, values = _TYPES[kind]
    count = math.prod(shape) // size
    if start + count * layout.itemsize > len(data):
        raise UsageError(f"the GGUF file ends within tensor {name}")
    return values(np.frombuffer(data, layout, count, start)).reshape(shape)
