"""A fake of cuda.bindings.runtime on the host.

Device memory is host memory. A stream executes its work when a caller waits for the stream. The fake has only the
functions that kvexport calls, under their real names; `tests/backends/tensorrt/test_api.py` compares them with the real
package.
"""

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorStreamCaptureUnsupported = 900


class cudaMemcpyKind(IntEnum):
    cudaMemcpyDefault = 4


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


class Stream:
    """A queue of work. While the stream is captured, new work goes into a graph and is not executed."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.done = 0
        self.graph: list[Callable[[], None]] | None = None

    def __int__(self) -> int:
        return id(self)

    def execute(self, number: int) -> None:
        while self.done < number:
            self.waiting.pop(0)()
            self.done += 1

    def add(self, work: Callable[[], None]) -> None:
        (self.waiting if self.graph is None else self.graph).append(work)


class Event:
    """A mark in a stream: the stream, and the number of the work before it."""

    def __init__(self) -> None:
        self.mark: tuple[Stream, int] | None = None


class FakeCuda:
    cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode = cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode
    cudaEventDisableTiming = 2
    cudaStreamNonBlocking = 1

    def __init__(self, *, name: str = "Fake GPU", capability: tuple[int, int] = (9, 0), devices: int = 1) -> None:
        self.name, self.capability, self.devices = name, capability, devices
        self.errors: dict[str, cudaError_t] = {}
        self.log: list[tuple[Any, ...]] = []
        self.memory: dict[int, Any] = {}
        self.destroyed: list[Any] = []
        self.streams: dict[int, Stream] = {}

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not (name.startswith("cuda") and callable(value)) or isinstance(value, type):
            return value

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append((name, *arguments))
            if name in self.errors:
                return (self.errors[name],)
            result = value(*arguments)
            return (cudaError_t.cudaSuccess,) if result is None else (cudaError_t.cudaSuccess, result)

        return call

    def called(self, name: str) -> int:
        return sum(entry[0] == name for entry in self.log)

    def cudaGetDeviceCount(self) -> int:
        return self.devices

    def cudaGetDevice(self) -> int:
        return 0

    def cudaGetDeviceProperties(self, device: int) -> Any:
        return SimpleNamespace(name=self.name.encode() + b"\0", major=self.capability[0], minor=self.capability[1])

    def cudaMalloc(self, size: int) -> int:
        return self._allocate(size)

    def cudaHostAlloc(self, size: int, flags: int) -> int:
        return self._allocate(size)

    def cudaFree(self, devPtr: int) -> None:
        del self.memory[devPtr]

    def cudaFreeHost(self, ptr: int) -> None:
        del self.memory[ptr]

    def cudaStreamCreateWithFlags(self, flags: int) -> Stream:
        stream = Stream()
        self.streams[int(stream)] = stream
        return stream

    def cudaStreamSynchronize(self, stream: Stream) -> None:
        assert stream.graph is None, "no caller waits for captured work"
        stream.execute(stream.done + len(stream.waiting))

    def cudaEventCreateWithFlags(self, flags: int) -> Event:
        assert flags == self.cudaEventDisableTiming
        return Event()

    def cudaEventDestroy(self, event: Event) -> None:
        event.mark = None

    def cudaEventRecord(self, event: Event, stream: Stream) -> None:
        assert stream.graph is None, "no graph contains an event"
        event.mark = stream, stream.done + len(stream.waiting)

    def cudaEventSynchronize(self, event: Event) -> None:
        assert event.mark is not None
        stream, number = event.mark
        stream.execute(number)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: int, stream: Stream) -> None:
        stream.add(lambda: ctypes.memmove(dst, src, count))

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: Stream) -> None:
        stream.add(lambda: ctypes.memset(devPtr, value, count))

    def cudaStreamBeginCapture(self, stream: Stream, mode: int) -> None:
        stream.graph = []

    def cudaStreamEndCapture(self, stream: Stream) -> list[Callable[[], None]]:
        graph, stream.graph = stream.graph, None
        assert graph is not None
        return graph

    def cudaGraphInstantiate(self, graph: list[Callable[[], None]], flags: int) -> list[Callable[[], None]]:
        return list(graph)

    def cudaGraphDestroy(self, graph: list[Callable[[], None]]) -> None:
        pass

    def cudaGraphExecDestroy(self, graphExec: list[Callable[[], None]]) -> None:
        self.destroyed.append(graphExec)

    def cudaGraphLaunch(self, graphExec: list[Callable[[], None]], stream: Stream) -> None:
        assert not any(graph is graphExec for graph in self.destroyed)
        for work in graphExec:
            stream.add(work)

    def _allocate(self, size: int) -> int:
        """Return memory at a multiple of 256 bytes, filled with 0xAB as with old data."""
        block = ctypes.create_string_buffer(b"\xab" * (size + 256), size + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = block
        return address


def install(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    bindings = ModuleType("cuda.bindings")
    bindings.runtime = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)  # type: ignore[arg-type]
    return cuda
