"""Tensors in host memory or on a GPU to which ONNX Runtime sessions are bound.

ONNX Runtime allocates the tensors on a GPU, so that no CUDA package for Python is needed.
"""

from __future__ import annotations

import ctypes
from copy import copy as shallow
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvexport.backends.onnxruntime import devices

# The arguments of ONNX Runtime's `IOBinding.bind_input`: device, number of the device, type, shape, address.
Place = tuple[str, int, Any, tuple[int, ...], int]
ALL = slice(None)


class DeviceArray:
    def __init__(self, device: str, shape: tuple[int, ...], dtype: Any) -> None:
        from onnxruntime import OrtValue

        zeros = np.zeros(shape, dtype)
        self.device, self.shape, self.dtype, self.nbytes = device, zeros.shape, zeros.dtype, zeros.nbytes
        self._value = OrtValue.ortvalue_from_numpy(zeros, device, 0)
        self._whole: DeviceArray | None = None

    def write(self, values: ArrayLike) -> None:
        self._value.update_inplace(np.ascontiguousarray(np.broadcast_to(values, self.shape), dtype=self.dtype))

    def read(self) -> NDArray[Any]:
        array: NDArray[Any] = self._value.numpy()
        return array

    def lanes(self, lanes: slice, session: Any) -> DeviceArray:
        binding = session.io_binding()
        place = self.place(lanes)
        binding.bind_output(session.get_outputs()[0].name, *place)
        view = shallow(self)
        # `_whole` keeps the memory alive.
        view._value, view._whole, view.shape = binding.get_outputs()[0], self, place[3]
        view.nbytes = self.nbytes // self.shape[0] * view.shape[0]
        return view

    def place(self, lanes: slice = ALL) -> Place:
        first, last, _ = lanes.indices(self.shape[0])
        start = self._value.data_ptr() + first * (self.nbytes // self.shape[0])
        return self.device, 0, self.dtype.type, (last - first, *self.shape[1:]), start


Array = NDArray[Any] | DeviceArray


def write(array: Array, values: ArrayLike) -> None:
    if isinstance(array, DeviceArray):
        array.write(values)
    else:
        array[...] = values


def read(array: Array) -> NDArray[Any]:
    return array.read() if isinstance(array, DeviceArray) else array


def copy(source: Array, target: Array, source_lanes: slice = ALL, target_lanes: slice = ALL) -> None:
    if not (isinstance(source, DeviceArray) and isinstance(target, DeviceArray)):
        write(target[target_lanes], read(source)[source_lanes])  # type: ignore[index]
        return
    (*_, start), (*_, end) = source.place(source_lanes), target.place(target_lanes)
    count = len(range(*source_lanes.indices(source.shape[0]))) * (source.nbytes // source.shape[0])
    if source.device == "cpu":
        ctypes.memmove(end, start, count)
    else:
        _copy_on_cuda(start, end, count)


def _copy_on_cuda(source: int, target: int, count: int) -> None:
    """Copy bytes by NVIDIA's driver; earlier runs need no wait, because ONNX Runtime returned after them."""
    devices.use_first_gpu()
    devices.drive("cuMemcpyDtoD_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(count))
    devices.drive("cuCtxSynchronize")


def lanes_of(array: Array, lanes: slice, session: Any) -> Array:
    return array.lanes(lanes, session) if isinstance(array, DeviceArray) else array[lanes]


def place(array: Array, lanes: slice = ALL) -> Place:
    if isinstance(array, DeviceArray):
        return array.place(lanes)
    view = array[lanes]
    return "cpu", 0, view.dtype.type, view.shape, view.ctypes.data
