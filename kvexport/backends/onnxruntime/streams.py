"""The CUDA stream in which a model's ONNX Runtime sessions run, so that the host need not wait between two runs."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from kvexport.backends.onnxruntime import devices

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: copies between host and GPU do not wait for the stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class HostStream:
    address: int | None = None  # of a CUDA stream; None without a GPU

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def wait(self) -> None:
        """Do nothing, because runs without a GPU have ended when they return."""


class CudaStream(HostStream):
    """A CUDA stream; it exists until the process ends, because sessions may use it until they are closed."""

    def __init__(self) -> None:
        self._driver = devices.driver()  # loaded once: every step calls its functions
        self._stream = ctypes.c_void_p()
        self._free: list[ctypes.c_void_p] = []  # events that no mark uses
        self._thread = threading.local()
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self.address = self._stream.value

    def mark(self) -> Callable[[], None]:
        """Return a function, to be called once, that waits for all runs enqueued so far but not for later ones."""
        if self._free:
            event = self._free.pop()
        else:
            event = ctypes.c_void_p()
            self._call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        self._call("cuEventRecord", event, self._stream)

        def wait() -> None:
            self._call("cuEventSynchronize", event)
            self._free.append(event)

        return wait

    def wait(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if not getattr(self._thread, "has_context", False):
            devices.use_first_gpu()
            self._thread.has_context = True
        devices.check(self._driver, name, getattr(self._driver, name)(*arguments))


def new_stream(device: str) -> HostStream:
    """Return the CUDA stream for a model's sessions; without a GPU an object whose waits return at once."""
    return CudaStream() if device == "cuda" and not devices.driver_problem() else HostStream()
