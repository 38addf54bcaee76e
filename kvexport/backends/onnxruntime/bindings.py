"""The memory to which the inputs and outputs of an ONNX Runtime session are bound.

On the CPU the model state is one allocation. Batch lanes of the state are bound in place. One copy between host and GPU
moves all small tensors of a call, and logits may stay on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.onnxruntime.device_array import ALL, Array, DeviceArray, Place, place, read
from kvexport.backends.rows import TopLogits

CACHE_LINE = 64  # bytes


class DeviceRows:
    """Logits [lanes, 1, vocabulary] that stay on the GPU; the largest of each lane are in host memory."""

    def __init__(self, logits: DeviceArray, largest: Mapping[str, NDArray[Any]]) -> None:
        self._logits, self._largest = logits, largest
        self._whole: NDArray[np.float32] | None = None

    def top_logits(self, lane: int) -> TopLogits:
        values, ids, mass = (self._largest[name][lane, 0] for name in ("values", "ids", "mass"))
        return TopLogits(ids, values, float(mass[0]), self._logits.shape[-1])

    def row(self, lane: int) -> NDArray[np.float32]:
        """Return a lane's logits; the first call copies those of all lanes, as ONNX Runtime copies whole tensors."""
        if self._whole is None:
            self._whole = self._logits.read()
        row: NDArray[np.float32] = self._whole[lane, 0]
        return row


def bind(binding: Any, name: str | None, present: str | None, array: Array, lanes: slice = ALL) -> None:
    """Bind lanes of `array` as a session's input `name`, output `present`, or both, which updates it in place."""
    where = place(array, lanes)
    if name is not None:
        binding.bind_input(name, *where)
    if present is not None:
        binding.bind_output(present, *where)


class SmallTensors:
    """Small inputs or outputs of a session: on a GPU one allocation, so that one copy moves all."""

    def __init__(
        self, zeros: Callable[..., Array], tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> None:
        self._offsets, size = _laid_out(tensors)
        self._tensors = tensors
        piece = zeros((size,), np.dtype(np.uint8))
        self._device_piece = piece if isinstance(piece, DeviceArray) else None
        self._host_piece = np.zeros(size, np.uint8) if isinstance(piece, DeviceArray) else piece
        self.arrays = self._views(self._host_piece)

    def of_lanes(self, count: int) -> SmallTensors:
        """Return views of a call's small tensors [lanes, ...] for the first `count` lanes (rows of the batch)."""
        part = copy(self)
        part._tensors = {name: ((count, *shape[1:]), dtype) for name, (shape, dtype) in self._tensors.items()}
        part.arrays = part._views(self._host_piece)
        return part

    def _views(self, piece: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        return {name: _view(piece, self._offsets[name], shape, dtype) for name, (shape, dtype) in self._tensors.items()}

    def place(self, name: str) -> Place:
        array = self.arrays[name]
        if self._device_piece is None:
            return place(array)
        device, number, *_, start = self._device_piece.place()
        return device, number, array.dtype.type, array.shape, start + self._offsets[name]

    def bind(self, binding: Any, *, output: bool) -> None:
        for name in self.arrays:
            (binding.bind_output if output else binding.bind_input)(name, *self.place(name))

    def send(self) -> None:
        if self._device_piece is not None:
            self._device_piece.write(self._host_piece)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the small tensors on the GPU when the context ends, whatever was written to them meanwhile."""
        kept = None if self._device_piece is None else np.array(self._device_piece.read())
        yield
        if self._device_piece is not None and kept is not None:
            self._device_piece.write(kept)

    def fetch(self) -> dict[str, NDArray[Any]]:
        return self.arrays if self._device_piece is None else self._views(read(self._device_piece))


def in_one_piece(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, NDArray[Any]]:
    """Return arrays of zeros in one allocation, which numpy puts into huge pages: decoding reads it faster."""
    offsets, size = _laid_out(tensors)
    size += CACHE_LINE
    piece = np.zeros(size, np.uint8)
    begin = -piece.ctypes.data % CACHE_LINE
    return {name: _view(piece, begin + offsets[name], shape, dtype) for name, (shape, dtype) in tensors.items()}


def _laid_out(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[dict[str, int], int]:
    offsets, size = {}, 0
    for name, (shape, dtype) in tensors.items():
        offsets[name] = size
        size += -(-math.prod(shape) * dtype.itemsize // CACHE_LINE) * CACHE_LINE
    return offsets, size


def _view(piece: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    view: NDArray[Any] = piece[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return view
