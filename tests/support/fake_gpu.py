"""A fake GPU for PyTorch, so that code for a GPU runs to its last line without one.

Tensors on the device are in the host's memory. Streams and graphs do nothing. Events read a clock that advances by a
millisecond at each reading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

ALIGNED = 256  # bytes, as for a device's memory


class OnTheHost(TorchFunctionMode):
    """A mode of PyTorch that makes tensors for the device in the host's memory, with the device's alignment."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_device = str(kwargs.get("device") or "").startswith("cuda")
        if on_device:
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return aligned(result) if on_device and func is torch.full else result


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of bytes at an aligned address."""
    room = torch.empty(x.numel() + ALIGNED, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNED
    copy = room[start : start + x.numel()]
    copy.copy_(x)
    return copy


class Clock:
    """The fake GPU's clock, with counts of captured graphs and of their replays."""

    def __init__(self) -> None:
        self.now, self.captured, self.replayed = 0.0, 0, 0

    def tick(self) -> float:
        self.now += 1.0
        return self.now


@contextlib.contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Pretend within the `with` block that PyTorch has a GPU, and yield its clock."""
    clock = Clock()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.tick()

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    class Stream:
        cuda_stream = 0

        def wait_stream(self, _: Stream) -> None:
            pass

        def synchronize(self) -> None:
            pass

    class CUDAGraph:
        def replay(self) -> None:
            clock.replayed += 1

    @contextlib.contextmanager
    def within(*_: Any, **__: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def graph(_: CUDAGraph, *, stream: Stream) -> Iterator[None]:
        clock.captured += 1
        yield

    for name, stand_in in {
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "get_device_properties": lambda _: SimpleNamespace(
            name="A GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
        ),
        "current_stream": Stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "stream": within,
        "graph": graph,
        "mem_get_info": lambda: (1 << 30, 1 << 30),
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with OnTheHost():
        yield clock
