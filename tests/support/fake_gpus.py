"""Several fake GPUs on the host.

The fake of CUDA's driver has memory in files, which other processes map by a handle. ONNX Runtime's CPU provider stands
in for its CUDA provider. The driver has only the functions that kvexport calls, under their real names;
`tests/ranks/test_ranks_on_gpus.py` compares them with cuda.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any, ClassVar

from kvexport.backends.onnxruntime import devices, model, model_sessions
from kvexport.backends.onnxruntime.device_array import DeviceArray
from plugins.building import make

ON_HOST = make.host_output("onnxruntime-cuda-host")
# The program of a worker of `kvexport.ranks.processes` that also has fake GPUs.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from tests.support import fake_gpus; "
    "fake_gpus.install(setattr, fake_gpus.Driver()); from kvexport.ranks.worker import main; main()"
)


class Driver:
    """The fake of CUDA's driver.

    Attributes:
        log: The calls of functions.
        answers: The error codes of functions that fail, by name.
        apart: Pairs of GPUs that cannot reach each other's memory.
        held: The memory of all drivers of this process, by address, with its file.
    """

    held: ClassVar[dict[int, tuple[Any, int]]] = {}

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        self.log: list[str] = []
        self.answers: dict[str, int] = {}
        self.apart: set[tuple[int, int]] = set()

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

    def cuDeviceCanAccessPeer(self, reached: Any, one: int, other: int) -> None:
        reached._obj.value = (one, other) not in self.apart

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

    def cuMemHostRegister_v2(self, memory: Any, size: Any, flags: int) -> None:
        assert memory.value % 4096 == 0 and size.value and flags == 3

    def cuMemHostGetDevicePointer_v2(self, there: Any, memory: Any, flags: int) -> None:
        assert flags == 0
        there._obj.value = memory.value

    def cuMemHostUnregister(self, memory: Any) -> None:
        assert memory.value

    def cuMemAlloc_v2(self, memory: Any, size: Any) -> None:
        file = os.memfd_create("gpu")
        os.write(file, b"\xab" * size.value)  # old data
        memory._obj.value = self._mapped(file)

    def cuMemsetD8_v2(self, memory: Any, value: Any, size: Any) -> None:
        ctypes.memset(memory.value, value.value, size.value)

    def cuIpcGetMemHandle(self, handle: Any, memory: Any) -> None:
        name = f"/proc/{os.getpid()}/fd/{self.held[memory.value][1]}".encode()
        ctypes.memmove(ctypes.addressof(handle._obj), name, len(name))

    def cuIpcOpenMemHandle_v2(self, memory: Any, handle: Any, flags: int) -> None:
        assert flags == 1
        memory._obj.value = self._mapped(os.open(bytes(handle).rstrip(b"\0"), os.O_RDWR))

    def cuIpcCloseMemHandle(self, memory: Any) -> None:
        self._let_go(memory.value)

    def cuMemFree_v2(self, memory: Any) -> None:
        self._let_go(memory.value)

    def cuMemcpyDtoD_v2(self, to: Any, source: Any, size: Any) -> None:
        ctypes.memmove(to.value, source.value, size.value)

    def _mapped(self, file: int) -> int:
        block = ctypes.c_char.from_buffer(mmap(file, 0))
        self.held[ctypes.addressof(block)] = (block, file)
        return ctypes.addressof(block)

    def _let_go(self, address: int) -> None:
        _, file = self.held.pop(address)
        os.close(file)


def names_of_cuda_h(header: Path) -> set[str]:
    """Return the names that the driver's library exports for the functions that cuda.h declares."""
    import re

    text = header.read_text(encoding="utf-8", errors="replace")
    plain = set(re.findall(r"^CUresult CUDAAPI (cu\w+)\(", text, re.MULTILINE))
    later = dict(re.findall(r"#define (cu\w+)\s+(?:\w+\()?(cu\w+_v\d)", text))
    return {later.get(name, name) for name in plain}


class OnCpu(DeviceArray):
    """A device's tensor in the CPU's memory."""

    def __init__(self, device: str, shape: tuple[int, ...], dtype: Any) -> None:
        assert device == "cuda"
        super().__init__("cpu", shape, dtype)


def load_driver(driver: Driver) -> Callable[..., Any]:
    """Return a replacement of ctypes.CDLL that gives this driver in place of CUDA's."""
    real = ctypes.CDLL
    return lambda name, *rest, **named: driver if name == devices.DRIVER else real(name, *rest, **named)


def install(put: Callable[[Any, str, Any], None], driver: Driver) -> Driver:
    """Give this process the driver's GPUs, and make ONNX Runtime compute for them on the CPU.

    Args:
        put: setattr, or the setattr of a monkeypatch.
        driver: The fake driver.
    """
    real = model_sessions.open_session

    def open_session(path: Path, *, device: str, graphs: bool = False, **rest: Any) -> Any:
        return real(path, device="cpu", **rest)

    put(ctypes, "CDLL", load_driver(driver))
    put(devices, "problems", lambda device: [])
    put(model_sessions, "open_session", open_session)
    put(model, "DeviceArray", OnCpu)
    put(model_sessions, "DeviceArray", OnCpu)
    devices._first_context.cache_clear()
    return driver
