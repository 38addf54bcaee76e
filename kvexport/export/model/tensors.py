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
    """The place of one tensor in a file.

    Attributes:
        name: The tensor's name.
        file: The real file, symlinks resolved.
        dtype: The safetensors name of the type ("BF16").
        shape: The tensor's shape.
        offset: Bytes from the beginning of the file.
        nbytes: Bytes at that offset, row-major and little-endian.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Source(Protocol):
    """A weight that a checkpoint gives other than as a plain tensor. Sources of the same weight are equal."""

    @property
    def name(self) -> str:
        """The name of the tensor in the checkpoint."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [outputs, inputs]."""
        ...

    @property
    def packing(self) -> PackedFormat | None:
        """The format of packed rows; None: the rows come as floats."""
        ...

    def blocks(self) -> Iterator[dict[str, Array]]:
        """Yield all rows in turn.

        A packed block has `weight` as stored (`kvexport.ops.packed.pack`), `scale` and `minimum` [rows, groups], and
        `zero` [rows, groups] as numbers; a block of floats has `weight` [rows, inputs] float32. Raises UsageError for
        values that cannot be a weight.
        """
        ...

    def order(self) -> NDArray[np.int64]:
        """Return the order of the columns, [inputs], of a packing that is `ordered`."""
        ...


@dataclass(frozen=True)
class Dense:
    """A packed source as floats."""

    packed: Source
    packing: None = None

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.packed.name

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [outputs, inputs]."""
        return self.packed.shape

    def blocks(self) -> Iterator[dict[str, Array]]:
        """Yield the dequantized rows."""
        packing = self.packed.packing
        assert packing is not None
        order = {"order": self.order()} if packing.ordered else {}
        for block in self.packed.blocks():
            stored = {**block, **order}
            if "zero" in block:
                stored["zero"] = pack(block["zero"], packing.bits)
            yield {"weight": dequantize(packing, len(block["scale"]), self.shape[1], stored)}

    def order(self) -> NDArray[np.int64]:
        """Return the order of the packed source's columns."""
        return self.packed.order()


def dense_values(source: Source) -> NDArray[np.float32]:
    """Return the whole weight in float32, for a reference."""
    floats = source if source.packing is None else Dense(source)
    return np.concatenate([block["weight"] for block in floats.blocks()])
