"""An artifact's TensorRT engines over state on the GPU.

Where the operators are plugins, past and present are one address, as the plugins are made for. TensorRT may schedule
the nodes of a function as it likes, so there present has an address of its own and is copied back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.digests import read_verified
from kvexport.artifact.manifest import Manifest
from kvexport.backends.base import Memory
from kvexport.backends.lane_state import fill, read_used, slot_axes, votes_names, without_last
from kvexport.backends.rows import Rows, TopLogits
from kvexport.backends.tensorrt.cuda import ALIGNMENT, Arena, Cuda
from kvexport.backends.tensorrt.engines import DECODE, PREFILL, input_shape
from kvexport.backends.tensorrt.environment import REBUILD, import_runtime, require_gpu
from kvexport.backends.tensorrt.log import make_log
from kvexport.backends.tensorrt.plugin import register
from kvexport.backends.tensorrt.record import check_plan, engine_record
from kvexport.cache import CachePlan
from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError


class Engines:
    """The engines of one artifact; they hold the weights once, however many states use them.

    Raises EnvironmentProblem: no driver, GPU, TensorRT or plugin; a plan of another TensorRT, GPU or plugin version.
    ArtifactError: the artifact has no engines, or a plan is not what its digest says (it is then not opened: a plan is
    native code).
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        engines = engine_record(path, manifest)
        if engines is None:
            raise ArtifactError(
                f"{path} has graphs and no engines yet",
                f"kvexport build --from {path}, on the machine that is to run it",
            )
        self.cuda = Cuda()
        gpu = require_gpu(self.cuda)
        options = engines.options
        self.trt = import_runtime(version_compatible=options.version_compatible)
        check_plan(engines, self.trt.__version__, gpu)
        self.streams_weights = options.weight_streaming is not None
        self.in_place = {kind: manifest.operators.get(op) != "function" for kind, op in _OPERATOR.items()}
        self.log = make_log(self.trt)
        if engines.plugin_version is not None and not options.embed_plugin:
            register(self.trt)
        self._runtime = self.trt.Runtime(self.log)
        # What is version-compatible carries a runtime of its own, and perhaps the plugins: host code, whose digest is
        # checked below.
        self._runtime.engine_host_code_allowed = options.version_compatible
        self.decoder = self._open(path, manifest, engines.decoder)
        self.merge = self._open(path, manifest, engines.merge) if engines.merge else None
        self.top_logits = self._open(path, manifest, engines.top_logits) if engines.top_logits else None
        self.top_count = manifest.top_logits if self.top_logits is not None else 0
        if options.weight_streaming is not None:
            self.decoder.weight_streaming_budget_v2 = min(
                options.weight_streaming, self.decoder.streamable_weights_size
            )
        self.vocabulary = manifest.model.vocabulary
        self.all_logits = manifest.recipe.all_logits
        self.prefill_chunk = manifest.limits.prefill_chunk

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> TensorRTState:
        """State for `lanes` sequences, all empty, on the GPU."""
        return TensorRTState(self, plan, lanes)

    def _open(self, path: Path, manifest: Manifest, name: str) -> Any:
        plan = read_verified(path, name, manifest.files[name].sha256)
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = "; ".join(self.log.errors[-3:]) or "no reason given"
            raise EnvironmentProblem(
                f"TensorRT {self.trt.__version__} does not open {name} of {path}: {reason}", REBUILD
            )
        return engine


Copy = tuple[int, int, int]  # to, from, bytes
_OPERATOR = {"decoder": "VoteAttention", "merge": "MergeCache"}


class TensorRTState:
    """State of a fixed number of lanes on the GPU, and what advances it (see `ModelState`)."""

    def __init__(self, engines: Engines, plan: CachePlan, lanes: int) -> None:
        self.lanes = lanes
        self.plan = plan
        self.engines = engines
        self.cuda = engines.cuda
        self.stream = self.cuda.stream()
        self.names = [(name, present) for name, present, *_ in plan.state_names()]
        tensors = {
            name: (layer.shapes(lanes)[kind], layer.dtypes()[kind]) for name, _, layer, kind in plan.state_names()
        }
        self.state = Arena(self.cuda, tensors)
        self.past_length: NDArray[np.int64] = np.zeros((lanes, 1), dtype=np.int64)
        self.top_logits: int | None = engines.top_count
        self._tensors = tensors
        self._phases: dict[bool, _Phase] = {}
        merged = set(_names(engines.merge)) if engines.merge else set()
        self._merged = [pair for pair in self.names if pair[0] in merged]
        self._merger = _context(engines, engines.merge, 0, self.stream) if engines.merge else None
        # Where present goes that may not be written over past, and lanes whose own address TensorRT would not take.
        self.spare = None if all(engines.in_place.values()) else Arena(self.cuda, tensors)
        unaligned = any(self.state.size(name) // lanes % ALIGNMENT for name, _ in self.names)
        self.gathered = Arena(self.cuda, tensors) if unaligned and lanes > 1 else None
        self.clear(0, lanes)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """See `ModelState.clear`: an all-zero state is an empty cache."""
        if last - first == self.lanes:
            self.cuda.clear(self.state.device, self.state.nbytes, self.stream)
        else:
            for name, _ in self.names:
                place, size = self.share(name, first, last - first)
                self.cuda.clear(place, size, self.stream)
        self.past_length[first:last] = 0

    def share(self, name: str, first: int, count: int) -> tuple[int, int]:
        """Where some lanes of a state tensor are, and their bytes."""
        share = self.state.size(name) // self.lanes
        return self.state.pointer(name) + first * share, count * share

    def bind_lanes(
        self, context: Any, names: list[tuple[str, str]], first: int, count: int, *, width: int, in_place: bool
    ) -> tuple[list[Copy], list[Copy]]:
        """Bind the state of some lanes to a context: what is to be copied before a run of it, and after it, where their
        own memory is not aligned or may not be written over."""
        before, after = [], []
        for name, present in names:
            place, size = self.share(name, first, count)
            past = place
            if place % ALIGNMENT:
                assert self.gathered is not None
                past = self.gathered.pointer(name)
                before.append((past, place, size))
            result = past
            if not in_place:
                assert self.spare is not None
                result = self.spare.pointer(name)
            if result != place:
                after.append((place, result, size))
            _bind(context, name, past, input_shape(self.plan, name, count, width))
            _bind(context, present, result)
        return before, after

    def enqueue(self, copies: list[Copy]) -> None:
        """Enqueue them."""
        for target, source, size in copies:
            self.cuda.copy(target, source, size, self.stream)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """See `ModelState.decode`."""
        return self._run(input_ids, query_length, first).logits(*input_ids.shape)

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """See `ModelState.step`."""
        phase = self._run(input_ids, query_length, first)
        self.cuda.synchronize(self.stream)
        return phase

    def _run(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int) -> _Phase:
        single = input_ids.shape[1] == 1
        if single not in self._phases:
            self._phases[single] = _Phase(self, 1 if single else self.engines.prefill_chunk)
        phase = self._phases[single]
        seen = self.past_length[first : first + len(input_ids)]
        phase.run(input_ids, query_length, seen, first)
        seen += query_length
        return phase

    def merge(self, first: int, last: int) -> None:
        """See `ModelState.merge`."""
        before, after = self.bind_lanes(
            self._merger, self._merged, first, last - first, width=1, in_place=self.engines.in_place["merge"]
        )
        self.enqueue(before)
        _enqueue(self._merger, self.stream, self.engines)
        self.enqueue(after)

    def grown(self, lanes: int) -> TensorRTState:
        """See `ModelState.grown`."""
        more = TensorRTState(self.engines, self.plan, lanes)
        self.cuda.synchronize(self.stream)
        for name, _ in self.names:
            place, size = self.share(name, 0, self.lanes)
            self.cuda.copy(more.state.pointer(name), place, size, more.stream)
        self.cuda.synchronize(more.stream)
        more.past_length[: self.lanes] = self.past_length
        return more

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """See `ModelState.read`."""

        def whole(name: str) -> NDArray[Any]:
            shape, dtype = self._tensors[name]
            array: NDArray[Any] = np.empty(shape[1:], dtype)
            place, size = self.share(name, lane, 1)
            self.cuda.copy(array.ctypes.data, place, size, self.stream)
            self.cuda.synchronize(self.stream)
            return array

        return read_used(self.plan, whole, names)

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        """See `ModelState.write`."""
        axes, held = slot_axes(self.plan), []
        for name, values in state.items():
            shape, dtype = self._tensors[name]
            array: NDArray[Any] = np.empty(shape[1:], dtype)
            fill(array, values, axes[name])
            place, size = self.share(name, lane, 1)
            self.cuda.copy(place, array.ctypes.data, size, self.stream)
            held.append(array)  # until it is copied
        self.cuda.synchronize(self.stream)
        if past_length is not None:
            self.past_length[lane] = past_length

    def rollback(self, lane: int, count: int) -> None:
        """See `ModelState.rollback`."""
        left = int(self.past_length[lane, 0]) - count
        self.write(lane, without_last(self.read(lane, votes_names(self.plan)), count), left)

    def copy(self, source: int, target: int) -> None:
        """See `ModelState.copy`."""
        for name, _ in self.names:
            place, size = self.share(name, source, 1)
            self.cuda.copy(self.share(name, target, 1)[0], place, size, self.stream)
        self.past_length[target] = self.past_length[source]

    def view(self, lane: int) -> None:
        """See `ModelState.view`: state is on the GPU."""

    def get_state(self) -> dict[str, NDArray[Any]]:
        """A copy of every state tensor, by its input name."""
        found = {name: np.empty(shape, dtype) for name, (shape, dtype) in self._tensors.items()}
        for name, array in found.items():
            self.cuda.copy(array.ctypes.data, self.state.pointer(name), array.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return found

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Take over a state, and the tokens that each lane has seen [lanes, 1]."""
        held = {name: np.ascontiguousarray(array) for name, array in state.items()}
        for name, array in held.items():
            self.cuda.copy(self.state.pointer(name), array.ctypes.data, array.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        self.past_length[: len(past_length)] = past_length


class _Phase:
    """The decoder for calls of one token (decode), or of up to `tokens` (prefill): a context, and staging in
    page-locked memory. Decode is one CUDA graph: its copies and its enqueues, that for the largest logits among them;
    whole rows are fetched one by one (`Rows`)."""

    def __init__(self, backend: TensorRTState, tokens: int) -> None:
        engines, lanes = backend.engines, backend.lanes
        self.backend, self.tokens = backend, tokens
        self.cuda, self.stream = backend.cuda, backend.stream
        rows = tokens if engines.all_logits else 1
        one = ((lanes, 1), np.int64)
        self.inputs = Arena(
            self.cuda, {"input_ids": ((lanes, tokens), np.int64), "query_length": one, "past_length": one}, pinned=True
        )
        self.outputs = Arena(self.cuda, {"logits": ((lanes, rows, engines.vocabulary), np.float32)}, pinned=True)
        self.length = Arena(self.cuda, {"present_length": one})  # known here too, and read by nobody
        self.context = _context(engines, engines.decoder, DECODE if tokens == 1 else PREFILL, self.stream)
        self.found: Arena | None = None
        if tokens == 1 and engines.top_logits is not None:
            self._find_top_logits(engines, lanes)
        self._bound = (0, 0, 0)  # tokens, first lane, lanes
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        self._graph: Any = None
        self._calls = 0

    def _find_top_logits(self, engines: Engines, lanes: int) -> None:
        """Put the engine that finds them after the decoder, over the same logits."""
        shape = (lanes, 1, engines.top_count)
        found = {"values": (shape, np.float32), "ids": (shape, np.int32), "mass": ((lanes, 1, 1), np.float32)}
        self.found = Arena(self.cuda, found, pinned=True)
        self.finder = _context(engines, engines.top_logits, 0, self.stream)
        for name in found:
            _bind(self.finder, name, self.found.pointer(name))

    def top_logits(self, lane: int) -> TopLogits | None:
        """See `Rows.top_logits`."""
        if self.found is None:
            return None
        values, ids, mass = (self.found.array(name)[lane, 0] for name in ("values", "ids", "mass"))
        return TopLogits(ids, values, float(mass[0]), self.backend.engines.vocabulary)

    def row(self, lane: int) -> NDArray[np.float32]:
        """See `Rows.row`."""
        row: NDArray[np.float32] = self.outputs.array("logits")[lane, 0]
        self.cuda.copy(row.ctypes.data, self.outputs.pointer("logits") + lane * row.nbytes, row.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return row

    def logits(self, count: int, width: int) -> NDArray[np.float32]:
        """Logits [count, 1 or width, vocabulary] of the last call, in memory that the next one overwrites."""
        rows = width if self.backend.engines.all_logits else 1
        logits = self.outputs.array("logits", (count, rows, self.backend.engines.vocabulary))
        self.cuda.copy(logits.ctypes.data, self.outputs.pointer("logits"), logits.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return logits

    def run(
        self,
        input_ids: NDArray[np.int64],
        query_length: NDArray[np.int64],
        past_length: NDArray[np.int64],
        first: int,
    ) -> None:
        """Enqueue the call; `inputs` may be written again after a wait for it."""
        count, width = input_ids.shape
        if (width, first, count) != self._bound:
            self._bind(width, first, count)
        for name, array in (("input_ids", input_ids), ("query_length", query_length), ("past_length", past_length)):
            self.inputs.array(name, array.shape)[...] = array
        # A first call after a change of shapes does what no graph may hold; weights that travel are copied outside of
        # the stream.
        if self.tokens == 1 and self._calls == 1 and not self.backend.engines.streams_weights:
            try:
                self._graph = self.cuda.capture(self._enqueue, self.stream)
            except KvexportError as error:
                self.backend.engines.log.lines.append(f"[WARNING] decode runs without a CUDA graph: {error.problem}")
        self._calls += 1
        if self._graph is not None:
            self.cuda.launch(self._graph, self.stream)
        else:
            self._enqueue()

    def _bind(self, width: int, first: int, count: int) -> None:
        """Bind everything for calls of these lanes; a CUDA graph of other ones is of no more use."""
        backend = self.backend
        for name in ("input_ids", "query_length", "past_length"):
            _bind(self.context, name, self.inputs.pointer(name), input_shape(backend.plan, name, count, width))
        _bind(self.context, "logits", self.outputs.pointer("logits"))
        if self.found is not None:
            _bind(self.finder, "logits", self.outputs.pointer("logits"), (count, 1, backend.engines.vocabulary))
        _bind(self.context, "present_length", self.length.pointer("present_length"))
        in_place = backend.engines.in_place["decoder"]
        self._before, self._after = backend.bind_lanes(
            self.context, backend.names, first, count, width=width, in_place=in_place
        )
        if backend.spare is not None and not in_place and count == backend.lanes:
            self._after = [(backend.state.device, backend.spare.device, backend.state.nbytes)]
        self._bound = (width, first, count)
        self._graph, self._calls = None, 0

    def _enqueue(self) -> None:
        self.inputs.upload(self.stream)
        self.backend.enqueue(self._before)
        _enqueue(self.context, self.stream, self.backend.engines)
        self.backend.enqueue(self._after)
        if self.found is not None:
            _enqueue(self.finder, self.stream, self.backend.engines)
            self.found.download(self.stream)


def _context(engines: Engines, engine: Any, profile: int, stream: Any) -> Any:
    """A context of an engine, with memory for this profile alone."""
    context = engine.create_execution_context(engines.trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE)
    if context is None or not context.set_optimization_profile_async(profile, int(stream)):
        raise EnvironmentProblem(
            f"TensorRT makes no context of an engine: {'; '.join(engines.log.errors[-3:])}",
            "smaller limits.max_batch or cache.budget",
        )
    engines.cuda.synchronize(stream)
    return context


def _names(engine: Any) -> list[str]:
    return [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]


def _bind(context: Any, name: str, address: int, shape: tuple[int, ...] | None = None) -> None:
    """A tensor's address and, of an input, its shape."""
    if shape is not None and not context.set_input_shape(name, shape):
        raise KvexportError(f"the engine does not take {name} of shape {shape}")
    if not context.set_tensor_address(name, address):
        raise KvexportError(f"the engine does not take an address for {name}")


def _enqueue(context: Any, stream: Any, engines: Engines) -> None:
    if not context.execute_async_v3(int(stream)):
        raise KvexportError(
            f"TensorRT did not run an engine: {'; '.join(engines.log.errors[-3:]) or 'no reason given'}"
        )
