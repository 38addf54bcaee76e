"""What `gpu_check` measures: the library, loaded, and how its calls are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tests.conformance.cuda_library import DEVICE, HOST, Caller, DeviceMemory, HostMemory, load

Figures = dict[str, Any]
Row = dict[str, Any]
Case = TypeVar("Case")


class Skipped(Exception):
    """A part that this machine lacks something for."""


class Target:
    """The library under test and how its calls are timed: on a GPU by events around a graph's replay, on the host by
    the clock.

    small: of sizes that the host can do, on the host by itself. keep: takes a part's figures as far as they are, each
    time a row is measured. until: when a part has to end, by time.monotonic.
    """

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
        """`figures` with the rows that `measure` brings of every case, kept one after another. Where the time left is
        less than the longest case took, the other cases are named instead."""
        figures |= {"rows": []}
        cases, longest = list(cases), 0.0
        for i, case in enumerate(cases):
            began = time.monotonic()
            if began + 1.2 * longest > self.until:
                figures["left out for want of time"] = [str(one) for one in cases[i:]]
                break
            found = measure(case)
            figures["rows"] += found if isinstance(found, list) else [found]
            longest = max(longest, time.monotonic() - began)
            self.keep(figures)
        return figures

    @property
    def caller(self) -> Caller:
        """Loaded when it is first asked for: `build` makes it."""
        if self._caller is None:
            self._caller = Caller(load(HOST), HostMemory()) if self.on_host else Caller(load(DEVICE), DeviceMemory())
        return self._caller

    def scaled(self, number: int, on_host: int) -> int:
        """`number`, or what the host can do in its place."""
        return on_host if self.small else number

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """`run` as a CUDA graph, after it ran once; on the host `run` itself."""
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
        """Seconds of each of `rounds` runs, `reset` before each outside of the time: by events on a GPU, by the clock
        on the host."""
        found = []
        for _ in range(2 if self.on_host else rounds + warm):
            reset()
            if self.on_host:
                begin = time.perf_counter()
                run()
                found.append(time.perf_counter() - begin)
                continue
            import torch

            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return found[0 if self.on_host else warm :]

    def seconds(
        self, calls: list[Callable[[], Any]], reset: Callable[[], Any] = lambda: None, rounds: int = 15
    ) -> list[float]:
        """Of `rounds` runs of all calls in turn, the seconds per call."""

        def run() -> None:
            for call in calls:
                call()

        reset()
        return [span / len(calls) for span in self.spans(self.captured(run), reset, rounds)]
