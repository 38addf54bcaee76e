"""The ONNX Runtime sessions of an artifact: how they are opened, run, and replayed as CUDA graphs."""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.adapters import Adapters
from kvexport.backends.onnxruntime import devices
from kvexport.backends.onnxruntime.device_array import Array, DeviceArray, write
from kvexport.backends.onnxruntime.session import open_session
from kvexport.backends.onnxruntime.streams import new_stream
from kvexport.errors import EnvironmentProblem
from kvexport.images.patches import encoder_inputs
from kvexport.images.tiles import ImageSpec

log = logging.getLogger("kvexport.backends")
# The names of an artifact's ONNX Runtime sessions, one for each ONNX graph.
DECODER, MERGE, TOP_LOGITS, VISION = "decoder", "merge", "top_logits", "vision"
NO_GRAPH = -1  # ONNX Runtime's id for a run that neither captures a CUDA graph nor replays one


@cache
def _run_options(graph: int | None, wait: bool) -> Any:
    from onnxruntime import RunOptions

    options = RunOptions()
    if graph is not None:
        options.add_run_config_entry("gpu_graph_id", str(graph))
    if not wait:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


class Sessions:
    def __init__(
        self,
        decoder: Path,
        merge: Path | None,
        *,
        threads: int,
        vocabulary: int,
        all_logits: bool,
        operators: Mapping[str, Path | None],
        top_logits: tuple[Path, int],
        device: str = "cpu",
        graphs: bool = False,
        float_input: bool = False,
        adapters: Adapters | None = None,
        vision: Path | None = None,
        images: ImageSpec | None = None,
    ) -> None:
        if device != "cpu":  # the libraries are needed before LoRA adapters are copied to the device
            import onnxruntime

            devices.load_cuda_libraries(onnxruntime)
        self.vocabulary = vocabulary
        self.all_logits = all_logits
        self.device, self.in_host_memory = device, device == "cpu"
        self.zeros: Any = np.zeros if device == "cpu" else partial(DeviceArray, device)
        self.adapters = adapters or Adapters()
        self.adapter_tensors = {name: self.on_device(array) for name, array in self.adapters.tensors.items()}
        self._new_graphs = itertools.count(1)
        self.stream = new_stream(device)
        opened = partial(open_session, device=device, stream=self.stream.address)
        attention, merging = operators["VoteAttention"], operators["MergeCache"]
        self._open: dict[str, Callable[..., Any]] = {
            DECODER: partial(opened, decoder, threads=threads, operators=attention, float_input=float_input)
        }
        if merge:
            # MergeCache's ONNX function is one long chain of small nodes, which runs fastest on one thread.
            self._open[MERGE] = partial(opened, merge, threads=threads if merging else 1, operators=merging)
        path, self.top_count = top_logits
        self._open[TOP_LOGITS] = partial(opened, path, threads=1, operators=None)
        self.images, self._opening = images, threading.Lock()
        self.graphs, self.graph_problem = set(self._open) if graphs else set[str](), ""
        if self.graphs and (why := devices.graph_problem()):
            self.graphs.clear()
            self._report(why)
        if merging is None:
            self.graphs.discard(MERGE)  # shapes in MergeCache's ONNX function depend on values: no CUDA graph
        self._opened: dict[str, Any] = {}
        for name in self._open:
            if name != TOP_LOGITS or device != "cpu":
                self.session(name)
        if vision is not None:  # opened by the first image: a server of text alone need not load these weights
            self._open[VISION] = partial(opened, vision, threads=threads, operators=None)

    def on_device(self, array: NDArray[Any]) -> Array:
        tensor: Array = self.zeros(array.shape, array.dtype)
        write(tensor, array)
        return tensor

    def session(self, name: str) -> Any:
        if name not in self._opened:
            try:
                self._opened[name] = self._open[name](graphs=name in self.graphs)
            except EnvironmentProblem as error:
                if name not in self.graphs:
                    raise
                self.without_graphs(name, error.problem)
        return self._opened[name]

    @property
    def decoder(self) -> Any:
        return self.session(DECODER)

    @property
    def merge(self) -> Any | None:
        return self.session(MERGE) if MERGE in self._open else None

    def encode_tile(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        with self._opening:
            encoder = self.session(VISION)
        assert self.images is not None
        rows: NDArray[np.float32] = encoder.run(["image_rows"], encoder_inputs(pixels, self.images))[0]
        return rows

    @property
    def finder(self) -> Any:
        return self.session(TOP_LOGITS)

    def run(self, name: str, binding: Any, graph: int | None, *, wait: bool = True) -> None:
        session = self.session(name)
        if graph is None and wait:
            session.run_with_iobinding(binding)
        else:
            session.run_with_iobinding(binding, _run_options(graph, wait))

    def open_decoder(self, model: bytes) -> Any:
        return self._open[DECODER](graphs=False, model=model)

    def new_graph(self, name: str, stays: bool) -> int | None:
        if name not in self.graphs:
            return None
        return next(self._new_graphs) if stays else NO_GRAPH

    def without_graphs(self, name: str, why: str) -> None:
        self.graphs.discard(name)
        self._report(f"{name}: {why}")
        self._opened.pop(name, None)  # releases the old session before the new one is opened
        self._opened[name] = self._open[name](graphs=False)

    def _report(self, why: str) -> None:
        self.graph_problem += f"{'; ' if self.graph_problem else ''}{why}"
        log.warning("runs without CUDA graphs, which takes longer: %s", why)
