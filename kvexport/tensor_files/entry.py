"""The place of a tensor in a safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor in a file of the checkpoint.

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
