"""An artifact's TensorRT engines over state on the GPU.

Where the operators are plugins, past and present are one address, as the plugins are made for. TensorRT may schedule
the nodes of a function as it likes, so there present has an address of its own and is copied back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.base import Memory, ModelState
from kvexport.backends.lane_state import fill, is_captured, read_used, slot_axes, votes_names, without_last
from kvexport.backends.rows import Rows, TopLogits
from kvexport.backends.tensorrt.cuda import ALIGNMENT, Arena
from kvexport.backends.tensorrt.engines import DECODE, PREFILL, input_shape
from kvexport.backends.tensorrt.plans import Plans, bind, names
from kvexport.cache import CachePlan

Copy = tuple[int, int, int]  # to, from, bytes


class Engines(Plans):
    """The engines of one artifact, however many states use them (see `kvexport.backends.base.LoadedModel`)."""

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> TensorRTState:
        """State for `lanes` sequences, all empty, on the GPU."""
        return TensorRTState(self, plan, lanes)


class TensorRTState(ModelState):
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
        self._merges: dict[tuple[int, int] | None, _Merge] = {}
        # Merges follow one another in the stream, so their contexts work in one piece of memory.
        self.merge_memory = (
            Arena(self.cuda, {"memory": ((engines.merge.device_memory_size_v2,), np.uint8)}) if engines.merge else None
        )
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
            bind(context, name, past, input_shape(self.plan, name, count, width))
            bind(context, present, result)
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
        key = (first, last) if is_captured(first, last) else None
        if key not in self._merges:
            self._merges[key] = _Merge(self)
        self._merges[key].run(first, last)

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
        self.context = engines.context(engines.decoder, DECODE if tokens == 1 else PREFILL, self.stream)
        self.found: Arena | None = None
        if tokens == 1 and engines.top_logits is not None:
            self._find_top_logits(engines, lanes)
        self._bound = (0, 0, 0)  # tokens, first lane, lanes
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        self._replay = engines.replay(self.stream, "decode")

    def _find_top_logits(self, engines: Engines, lanes: int) -> None:
        """Put the engine that finds them after the decoder, over the same logits."""
        shape = (lanes, 1, engines.top_count)
        found = {"values": (shape, np.float32), "ids": (shape, np.int32), "mass": ((lanes, 1, 1), np.float32)}
        self.found = Arena(self.cuda, found, pinned=True)
        self.finder = engines.context(engines.top_logits, 0, self.stream)
        for name in found:
            bind(self.finder, name, self.found.pointer(name))

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
        # Prompts change their shapes; weights that travel are copied outside of the stream.
        if self.tokens > 1 or self.backend.engines.streams_weights:
            self._enqueue()
        else:
            self._replay(self._enqueue)

    def _bind(self, width: int, first: int, count: int) -> None:
        """Bind everything for calls of these lanes; a CUDA graph of other ones is of no more use."""
        backend = self.backend
        for name in ("input_ids", "query_length", "past_length"):
            bind(self.context, name, self.inputs.pointer(name), input_shape(backend.plan, name, count, width))
        bind(self.context, "logits", self.outputs.pointer("logits"))
        if self.found is not None:
            bind(self.finder, "logits", self.outputs.pointer("logits"), (count, 1, backend.engines.vocabulary))
        bind(self.context, "present_length", self.length.pointer("present_length"))
        in_place = backend.engines.in_place["decoder"]
        self._before, self._after = backend.bind_lanes(
            self.context, backend.names, first, count, width=width, in_place=in_place
        )
        if backend.spare is not None and not in_place and count == backend.lanes:
            self._after = [(backend.state.device, backend.spare.device, backend.state.nbytes)]
        self._bound = (width, first, count)
        self._replay = backend.engines.replay(self.stream, "decode")

    def _enqueue(self) -> None:
        self.inputs.upload(self.stream)
        self.backend.enqueue(self._before)
        self.backend.engines.enqueue(self.context, self.stream)
        self.backend.enqueue(self._after)
        if self.found is not None:
            self.backend.engines.enqueue(self.finder, self.stream)
            self.found.download(self.stream)


class _Merge:
    """The merge of some lanes: a context of its own, because a CUDA graph is of the shapes that its context had, and
    the CUDA graph of its copies and its run, for as long as they are the same lanes."""

    def __init__(self, backend: TensorRTState) -> None:
        self.backend, engines = backend, backend.engines
        assert backend.merge_memory is not None
        self.context = engines.context(engines.merge, 0, backend.stream, backend.merge_memory.device)
        merged = set(names(engines.merge))
        self._names = [pair for pair in backend.names if pair[0] in merged]
        self._bound = (0, 0)
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        self._replay = engines.replay(backend.stream, "merging")

    def run(self, first: int, last: int) -> None:
        """Enqueue it."""
        if (first, last) != self._bound:
            backend = self.backend
            self._before, self._after = backend.bind_lanes(
                self.context, self._names, first, last - first, width=1, in_place=backend.engines.in_place["merge"]
            )
            self._bound = (first, last)
            self._replay = backend.engines.replay(backend.stream, "merging")
        self._replay(self._enqueue)

    def _enqueue(self) -> None:
        self.backend.enqueue(self._before)
        self.backend.engines.enqueue(self.context, self.backend.stream)
        self.backend.enqueue(self._after)
