"""The runtime's device path without a device: the state is in the CPU's memory, held by ONNX Runtime."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.backends.onnxruntime.model_sessions import DECODER, MERGE, TOP_LOGITS


class LateStream:
    """A stream whose runs are computed as late as a GPU may compute them: when somebody waits for them."""

    address = None

    def __init__(self, run: Callable[..., None]) -> None:
        self._run, self._runs = run, deque[Callable[[], None]]()
        self.late = self.computed = 0

    def run(self, name: str, binding: Any, graph: int | None, *, wait: bool = True) -> None:
        if wait:
            self.wait()
            self._run(name, binding, graph)
        else:
            self._runs.append(partial(self._run, name, binding, graph))
            self.late += 1

    def mark(self) -> Callable[[], None]:
        return partial(self._compute, self.late)

    def wait(self) -> None:
        self._compute(self.late)

    def _compute(self, number: int) -> None:
        while self.computed < number:
            self._runs.popleft()()
            self.computed += 1


def onto_device(engine: Any, *, graphs: bool = False, late: bool = False) -> Any:
    sessions = engine.model
    sessions.zeros = partial(DeviceArray, "cpu")
    sessions.graphs = {DECODER, MERGE, TOP_LOGITS} if graphs else set()
    if late:
        sessions.stream = LateStream(sessions.run)
        sessions.run = sessions.stream.run
    return engine
