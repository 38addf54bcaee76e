"""What a session's inputs and outputs are bound to: state in one piece of memory, lanes of it in place, and logits that
stay on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.base import Memory
from kvexport.backends.onnxruntime.device_array import ALL, Array, DeviceArray, place
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


def in_one_piece(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], memory: Memory | None = None
) -> dict[str, NDArray[Any]]:
    """Arrays of zeros that share one allocation, numpy's unless `memory` gives it: numpy asks for huge pages for a
    large one, which decoding reads faster than many small ones in small pages."""
    sizes = [-(-math.prod(shape) * dtype.itemsize // CACHE_LINE) * CACHE_LINE for shape, dtype in tensors.values()]
    size = sum(sizes) + CACHE_LINE
    piece = np.zeros(size, np.uint8) if memory is None else memory(size)
    begin = -piece.ctypes.data % CACHE_LINE
    arrays = {}
    for (name, (shape, dtype)), size in zip(tensors.items(), sizes, strict=True):
        arrays[name] = piece[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        begin += size
    return arrays
