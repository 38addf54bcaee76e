"""What a session's inputs and outputs are bound to: state in one piece of memory, lanes of it in place, small tensors
that travel together, and logits that stay on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.base import Memory
from kvexport.backends.onnxruntime.device_array import ALL, Array, DeviceArray, place, read
from kvexport.backends.rows import TopLogits

CACHE_LINE = 64  # bytes


class DeviceRows:
    """Logits [lanes, 1, vocabulary] that stay on the device, and the largest ones of each row."""

    def __init__(self, logits: DeviceArray, found: Mapping[str, NDArray[Any]]) -> None:
        self._logits, self._found = logits, found
        self._whole: NDArray[np.float32] | None = None

    def top_logits(self, lane: int) -> TopLogits:
        """See `Rows.top_logits`."""
        values, ids, mass = (self._found[name][lane, 0] for name in ("values", "ids", "mass"))
        return TopLogits(ids, values, float(mass[0]), self._logits.shape[-1])

    def row(self, lane: int) -> NDArray[np.float32]:
        """See `Rows.row`. ONNX Runtime copies tensors as a whole: the first lane that asks brings all."""
        if self._whole is None:
            self._whole = self._logits.read()
        row: NDArray[np.float32] = self._whole[lane, 0]
        return row


def bind(binding: Any, name: str | None, present: str | None, array: Array, lanes: slice = ALL) -> None:
    """Lanes of `array` as the input `name` and the output `present`; both make it in place."""
    where = place(array, lanes)
    if name is not None:
        binding.bind_input(name, *where)
    if present is not None:
        binding.bind_output(present, *where)


class Travelling:
    """Small tensors of a call, by name, that the host writes or reads. On a device they are parts of one piece, which
    one copy takes there or back; on the CPU they are bound where they are. zeros: makes arrays where the call runs."""

    def __init__(
        self, zeros: Callable[..., Array], tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> None:
        self._offsets, size = _laid_out(tensors)
        self._tensors = tensors
        piece = zeros((size,), np.dtype(np.uint8))
        self._there = piece if isinstance(piece, DeviceArray) else None
        self._here = np.zeros(size, np.uint8) if isinstance(piece, DeviceArray) else piece
        self.arrays = self._parts(self._here)

    def _parts(self, piece: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        return {name: _part(piece, self._offsets[name], shape, dtype) for name, (shape, dtype) in self._tensors.items()}

    def bind(self, binding: Any, *, output: bool) -> None:
        """As inputs of their names, or as outputs."""
        for name, array in self.arrays.items():
            where = place(array)
            if self._there is not None:
                device, number, *_, start = self._there.place()
                where = (device, number, array.dtype.type, array.shape, start + self._offsets[name])
            (binding.bind_output if output else binding.bind_input)(name, *where)

    def send(self) -> None:
        """What was written into `arrays` is what the next call reads."""
        if self._there is not None:
            self._there.write(self._here)

    def fetch(self) -> dict[str, NDArray[Any]]:
        """What the last call wrote; on the CPU the next one overwrites it."""
        return self.arrays if self._there is None else self._parts(read(self._there))


def in_one_piece(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], memory: Memory | None = None
) -> dict[str, NDArray[Any]]:
    """Arrays of zeros that share one allocation, numpy's unless `memory` gives it: numpy asks for huge pages for a
    large one, which decoding reads faster than many small ones in small pages."""
    offsets, size = _laid_out(tensors)
    size += CACHE_LINE
    piece = np.zeros(size, np.uint8) if memory is None else memory(size)
    begin = -piece.ctypes.data % CACHE_LINE
    return {name: _part(piece, begin + offsets[name], shape, dtype) for name, (shape, dtype) in tensors.items()}


def _laid_out(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[dict[str, int], int]:
    """Where each begins in one piece, at a multiple of a cache line, and the bytes of all."""
    offsets, size = {}, 0
    for name, (shape, dtype) in tensors.items():
        offsets[name] = size
        size += -(-math.prod(shape) * dtype.itemsize // CACHE_LINE) * CACHE_LINE
    return offsets, size


def _part(piece: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    part: NDArray[Any] = piece[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return part
