"""Tensors where a session wants them: numpy arrays in the host's memory, and tensors in a device's, which ONNX Runtime
itself holds, so that no CUDA package is needed."""

from __future__ import annotations

import ctypes
from copy import copy as shallow
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvexport.backends.onnxruntime import devices

# As `IOBinding.bind_input` takes it: device, its number, type, shape, address.
Place = tuple[str, int, Any, tuple[int, ...], int]
ALL = slice(None)


class DeviceArray:
    """A tensor at a fixed address of a device ("cuda"), all zeros at first. It is written and read as a whole; some
    lanes of it as a `part`."""

    def __init__(self, device: str, shape: tuple[int, ...], dtype: Any) -> None:
        from onnxruntime import OrtValue

        zeros = np.zeros(shape, dtype)
        self.device, self.shape, self.dtype, self.nbytes = device, zeros.shape, zeros.dtype, zeros.nbytes
        self._value = OrtValue.ortvalue_from_numpy(zeros, device, 0)
        self._whole: DeviceArray | None = None

    def write(self, values: ArrayLike) -> None:
        """Take over `values`, of this shape or one number for all."""
        self._value.update_inplace(np.ascontiguousarray(np.broadcast_to(values, self.shape), dtype=self.dtype))

    def read(self) -> NDArray[Any]:
        """What is there, in the host's memory."""
        array: NDArray[Any] = self._value.numpy()
        return array

    def part(self, lanes: slice, session: Any) -> DeviceArray:
        """Some lanes of it, in the same memory, as a tensor of their own. session: any one; ONNX Runtime makes a tensor
        over existing memory only as an output of a session."""
        binding = session.io_binding()
        place = self.place(lanes)
        binding.bind_output(session.get_outputs()[0].name, *place)
        part = shallow(self)  # holds on to the memory by `_whole`
        part._value, part._whole, part.shape = binding.get_outputs()[0], self, place[3]
        part.nbytes = self.nbytes // self.shape[0] * part.shape[0]
        return part

    def place(self, lanes: slice = ALL) -> Place:
        """Where some lanes of it are, lanes being dimension 0."""
        first, last, _ = lanes.indices(self.shape[0])
        start = self._value.data_ptr() + first * (self.nbytes // self.shape[0])
        return self.device, 0, self.dtype.type, (last - first, *self.shape[1:]), start


Array = NDArray[Any] | DeviceArray


def write(array: Array, values: ArrayLike) -> None:
    """Into memory of either kind."""
    if isinstance(array, DeviceArray):
        array.write(values)
    else:
        array[...] = values


def read(array: Array) -> NDArray[Any]:
    """A device's tensor as a copy, a numpy array as it is."""
    return array.read() if isinstance(array, DeviceArray) else array


def copy(source: Array, target: Array, taken: slice = ALL, given: slice = ALL) -> None:
    """Lanes `taken` of one to lanes `given` of the other, in memory of one kind; without the host where it is a
    device's."""
    if not (isinstance(source, DeviceArray) and isinstance(target, DeviceArray)):
        write(target[given], read(source)[taken])  # type: ignore[index]
        return
    (*_, start), (*_, end) = source.place(taken), target.place(given)
    count = len(range(*taken.indices(source.shape[0]))) * (source.nbytes // source.shape[0])
    if source.device == "cpu":
        ctypes.memmove(end, start, count)
    else:
        _copy_on_cuda(start, end, count)


def _copy_on_cuda(source: int, target: int, count: int) -> None:
    """By the driver, which is there where ONNX Runtime's provider runs. Runs of ONNX Runtime have ended before: their
    outputs are waited for."""
    devices.use_first_gpu()
    devices.drive("cuMemcpyDtoD_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(count))
    devices.drive("cuCtxSynchronize")


def part(array: Array, lanes: slice, session: Any) -> Array:
    """Some lanes of it, in the same memory. session: see `DeviceArray.part`."""
    return array.part(lanes, session) if isinstance(array, DeviceArray) else array[lanes]


def place(array: Array, lanes: slice = ALL) -> Place:
    """Where some lanes of it are."""
    if isinstance(array, DeviceArray):
        return array.place(lanes)
    part = array[lanes]
    return "cpu", 0, part.dtype.type, part.shape, part.ctypes.data
