"""The library that `gpu_check` measures, and the timing of its calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tests.conformance.cuda_library import DEVICE, HOST, Caller, DeviceMemory, HostMemory, load

Figures = dict[str, Any]
Row = dict[str, Any]
Case = TypeVar("Case")


class Skipped(Exception):
    """A part cannot run because this machine lacks something."""


class Target:
    """The library under test, and the timing of its calls: on a GPU by events around a graph, else by the clock."""

    def __init__(
        self,
        *,
        on_host: bool,
        small: bool = False,
        keep: Callable[[Figures], None] = lambda _: None,
        until: float = float("inf"),
    ) -> None:
        self.on_host, self.small, self.keep, self.until = on_host, small or on_host, keep, until
        self._caller: Caller | None = None

    def rows(self, cases: Iterable[Case], figures: Figures, measure: Callable[[Case], Row | list[Row]]) -> Figures:
        """Return `figures` with the rows that `measure` returns for every case; each row is kept at once.

        If the time left is less than the longest case took, the remaining cases are only named.
        """
        figures |= {"rows": []}
        cases, longest = list(cases), 0.0
        for i, case in enumerate(cases):
            began = time.monotonic()
            if began + 1.2 * longest > self.until:
                figures["left out for want of time"] = [str(one) for one in cases[i:]]
                break
            measured = measure(case)
            figures["rows"] += measured if isinstance(measured, list) else [measured]
            longest = max(longest, time.monotonic() - began)
            self.keep(figures)
        return figures

    @property
    def caller(self) -> Caller:
        """The library, loaded at the first use because the part `build` builds it."""
        if self._caller is None:
            self._caller = Caller(load(HOST), HostMemory()) if self.on_host else Caller(load(DEVICE), DeviceMemory())
        return self._caller

    def scaled(self, number: int, on_host: int) -> int:
        """Return `number`, or on the host the smaller number `on_host`."""
        return on_host if self.small else number

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return `run` as a CUDA graph, after one run without capture; on the host `run` itself."""
        if self.on_host:
            return run
        import torch

        memory, stream = self.caller.memory, torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        default, memory.stream = memory.stream, stream.cuda_stream
        try:
            with torch.cuda.stream(stream):
                run()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    run()
        finally:
            memory.stream = default
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    def spans(self, run: Callable[[], Any], reset: Callable[[], Any], rounds: int, warm: int = 3) -> list[float]:
        """Return the seconds of each of `rounds` runs, with an untimed `reset` before each.

        A GPU's events measure them, on the host the clock.
        """
        seconds = []
        for _ in range(2 if self.on_host else rounds + warm):
            reset()
            if self.on_host:
                begin = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - begin)
                continue
            import torch

            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return seconds[0 if self.on_host else warm :]

    def seconds(
        self, calls: list[Callable[[], Any]], reset: Callable[[], Any] = lambda: None, rounds: int = 15
    ) -> list[float]:
        """Return the seconds per call of `rounds` runs of all calls in turn."""

        def run() -> None:
            for call in calls:
                call()

        reset()
        return [span / len(calls) for span in self.spans(self.captured(run), reset, rounds)]
