"""The place of a tensor in a safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorEntry:
    name: str
    file: Path  # real file, symlinks resolved
    dtype: str  # safetensors name of the type ("BF16")
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    nbytes: int  # bytes at that offset, row-major and little-endian
