"""A fake of CUDA's driver, with only the functions that kvexport calls, under their real names.

`tests/backends/onnxruntime/test_streams.py` compares them with cuda.h.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvexport.backends.onnxruntime import devices


class Driver:
    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        self.log: list[str] = []
        self.answers: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value

        def call(*arguments: Any) -> int:
            self.log.append(name)
            if code := self.answers.get(name, 0):
                return code
            value(*arguments)
            return 0

        return call

    def cuInit(self, flags: int) -> None:
        assert flags == 0

    def cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_%d" % code

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.gpus

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        assert device == 0
        context._obj.value = 1

    def cuCtxSetCurrent(self, context: Any) -> None:
        assert context.value == 1

    def cuCtxSynchronize(self) -> None:
        pass

    def cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == 1
        stream._obj.value = 2

    def cuStreamSynchronize(self, stream: Any) -> None:
        assert stream.value == 2

    def cuEventCreate(self, event: Any, flags: int) -> None:
        assert flags == 2
        event._obj.value = 3

    def cuEventRecord(self, event: Any, stream: Any) -> None:
        assert (event.value, stream.value) == (3, 2)

    def cuEventSynchronize(self, event: Any) -> None:
        assert event.value == 3

    def cuMemcpyDtoD_v2(self, to: Any, source: Any, size: Any) -> None:
        ctypes.memmove(to.value, source.value, size.value)


def names_of_cuda_h(header: Path) -> set[str]:
    """Return the names that the driver's library exports for the functions that cuda.h declares."""
    import re

    text = header.read_text(encoding="utf-8", errors="replace")
    plain = set(re.findall(r"^CUresult CUDAAPI (cu\w+)\(", text, re.MULTILINE))
    later = dict(re.findall(r"#define (cu\w+)\s+(?:\w+\()?(cu\w+_v\d)", text))
    return {later.get(name, name) for name in plain}


def load_driver(driver: Driver) -> Callable[..., Any]:
    """Return a replacement of ctypes.CDLL that gives this driver in place of CUDA's."""
    real = ctypes.CDLL
    return lambda name, *rest, **named: driver if name == devices.DRIVER else real(name, *rest, **named)
