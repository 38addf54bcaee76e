"""What a checkpoint gives for a weight: a tensor that lies in one of its files, or a source that computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvexport.ops.packed import PackedFormat, dequantize, pack

Array = NDArray[Any]


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. file: the real file, symlinks resolved. dtype: the safetensors name ("BF16"). offset:
    bytes from the beginning of the file. nbytes: bytes at that offset, row-major, little-endian."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Source(Protocol):
    """Where a weight comes from. Sources of the same weight are equal."""

    @property
    def name(self) -> str:
        """Its tensor in the checkpoint."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]"""
        ...

    @property
    def packing(self) -> PackedFormat | None:
        """How it is packed; None: it comes as floats."""
        ...

    def blocks(self) -> Iterator[dict[str, Array]]:
        """All rows in turn. Packed: `weight` as stored (`kvexport.ops.packed.pack`), `scale`, `minimum` [rows, groups],
        `zero` [rows, groups] as numbers; floats: `weight` [rows, inputs] float32. Raises UsageError for what cannot be
        a weight."""
        ...

    def order(self) -> NDArray[np.int64]:
        """[inputs], of a packing that is `ordered`."""
        ...


@dataclass(frozen=True)
class Dense:
    """A packed source as floats."""

    packed: Source
    packing: None = None

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.packed.name

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]"""
        return self.packed.shape

    def blocks(self) -> Iterator[dict[str, Array]]:
        """Its rows."""
        packing = self.packed.packing
        assert packing is not None
        order = {"order": self.order()} if packing.ordered else {}
        for block in self.packed.blocks():
            stored = {**block, **order}
            if "zero" in block:
                stored["zero"] = pack(block["zero"], packing.bits)
            yield {"weight": dequantize(packing, len(block["scale"]), self.shape[1], stored)}

    def order(self) -> NDArray[np.int64]:
        """Of the packed source."""
        return self.packed.order()


def dense_values(source: Source) -> NDArray[np.float32]:
    """The whole weight in float32, for a reference."""
    floats = source if source.packing is None else Dense(source)
    return np.concatenate([block["weight"] for block in floats.blocks()])
