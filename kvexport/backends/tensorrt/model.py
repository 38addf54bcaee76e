"""A model on TensorRT engines, with its KV caches on the GPU, and the calls of its engines.

If one plugin updates a state tensor, its input (past) and output (present) have the same address. If several nodes of
an engine update the tensor, present has another address and is copied back after the run, because TensorRT may run the
nodes in any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.lane_state import fill, is_captured, read_used, slot_places, votes_names, without_last
from kvexport.backends.model_state import ModelState, Pending
from kvexport.backends.rows import Rows, TopLogits
from kvexport.backends.tensorrt.cuda import ALIGNMENT, Arena
from kvexport.backends.tensorrt.engines import DECODE, PREFILL, input_shape
from kvexport.backends.tensorrt.plans import Plans, bind, names
from kvexport.plan.cache import CachePlan

Copy = tuple[int, int, int]  # target address, source address, bytes


class LoadedModel(Plans):
    in_host_memory = False

    def new_state(self, plan: CachePlan, lanes: int) -> TensorRTState:
        return TensorRTState(self, plan, lanes)


class TensorRTState(ModelState):
    def __init__(self, engines: LoadedModel, plan: CachePlan, lanes: int) -> None:
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
        self.runs_ahead = True
        self._tensors = tensors
        self._phases: dict[tuple[bool, int], Phase] = {}  # by whether a call has one token, and by turn
        self._latest = (0, np.zeros((lanes, 1), np.int64), 0)  # of the latest decode call: first lane, lengths, turn
        self._merges: dict[tuple[int, int] | None, Merge] = {}
        # The engines run one after another in the stream, so all execution contexts share one piece of scratch memory.
        self.scratch = Arena(self.cuda, {"memory": ((engines.memory_size,), np.uint8)})
        # Memory for outputs (present) that must not overwrite inputs (past), and for lanes whose address is not
        # aligned.
        kept = [name for name in tensors if name not in engines.overwritten["decoder"]]
        if engines.merge is not None:
            merged = set(names(engines.merge)) - engines.overwritten["merge"]
            kept = [name for name in tensors if name in {*kept, *merged}]
        self.spare = Arena(self.cuda, {name: tensors[name] for name in kept}) if kept else None
        unaligned = any(self.state.size(name) // lanes % ALIGNMENT for name, _ in self.names)
        self.gathered = Arena(self.cuda, tensors) if unaligned and lanes > 1 else None
        self.clear(0, lanes)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        if last - first == self.lanes:
            self.cuda.clear(self.state.device, self.state.nbytes, self.stream)
        else:
            for name, _ in self.names:
                place, size = self.share(name, first, last - first)
                self.cuda.clear(place, size, self.stream)
        self.past_length[first:last] = 0

    def share(self, name: str, first: int, count: int) -> tuple[int, int]:
        share = self.state.size(name) // self.lanes
        return self.state.pointer(name) + first * share, count * share

    def bind_lanes(
        self, context: Any, names: list[tuple[str, str]], first: int, count: int, *, width: int, kind: str
    ) -> tuple[list[Copy], list[Copy]]:
        """Bind state tensors of lanes; return copies around the run, for unaligned or unoverwritable ones."""
        before, after = [], []
        for name, present in names:
            place, size = self.share(name, first, count)
            past = place
            if place % ALIGNMENT:
                assert self.gathered is not None
                past = self.gathered.pointer(name)
                before.append((past, place, size))
            result = past
            if name not in self.engines.overwritten[kind]:
                assert self.spare is not None
                result = self.spare.pointer(name)
            if result != place:
                after.append((place, result, size))
            bind(context, name, past, input_shape(self.plan, name, count, width))
            bind(context, present, result)
        return before, after

    def enqueue(self, copies: list[Copy]) -> None:
        for target, source, size in copies:
            self.cuda.copy(target, source, size, self.stream)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        return self._run(input_ids, query_length, first).logits(*input_ids.shape)

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        return self.begin(input_ids, query_length, first)()

    def begin(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Pending:
        self._latest = first, query_length.copy(), 0
        return self._run(input_ids, query_length, first).mark()

    def follow(self) -> Pending:
        first, query_length, turn = self._latest
        self._latest = first, query_length, 1 - turn
        return self._run(None, query_length, first, 1 - turn).mark()

    def _run(
        self, input_ids: NDArray[np.int64] | None, query_length: NDArray[np.int64], first: int, turn: int = 0
    ) -> Phase:
        single = input_ids is None or input_ids.shape[1] == 1
        phase = self._phase(single, turn)
        seen = self.past_length[first : first + len(query_length)]
        phase.run(self._phase(True, 1 - turn) if input_ids is None else input_ids, query_length, seen, first)
        seen += query_length
        return phase

    def _phase(self, single: bool, turn: int) -> Phase:
        key = single, turn
        if key not in self._phases:
            self._phases[key] = Phase(self, 1 if single else self.engines.prefill_chunk)
        return self._phases[key]

    def merge(self, first: int, last: int) -> None:
        key = (first, last) if is_captured(first, last) else None
        if key not in self._merges:
            self._merges[key] = Merge(self)
        self._merges[key].run(first, last)

    def grown(self, lanes: int) -> TensorRTState:
        larger = TensorRTState(self.engines, self.plan, lanes)
        self.cuda.synchronize(self.stream)
        for name, _ in self.names:
            place, size = self.share(name, 0, self.lanes)
            self.cuda.copy(larger.state.pointer(name), place, size, larger.stream)
        self.cuda.synchronize(larger.stream)
        larger.past_length[: self.lanes] = self.past_length
        return larger

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:

        def whole(name: str) -> NDArray[Any]:
            shape, dtype = self._tensors[name]
            array: NDArray[Any] = np.empty(shape[1:], dtype)
            place, size = self.share(name, lane, 1)
            self.cuda.copy(array.ctypes.data, place, size, self.stream)
            self.cuda.synchronize(self.stream)
            return array

        return read_used(self.plan, whole, names)

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        places, arrays = slot_places(self.plan), []
        for name, values in state.items():
            shape, dtype = self._tensors[name]
            array: NDArray[Any] = np.empty(shape[1:], dtype)
            fill(array, values, places[name])
            place, size = self.share(name, lane, 1)
            self.cuda.copy(place, array.ctypes.data, size, self.stream)
            arrays.append(array)  # keeps the memory until it is copied
        self.cuda.synchronize(self.stream)
        if past_length is not None:
            self.past_length[lane] = past_length

    def rollback(self, lane: int, count: int) -> None:
        left = int(self.past_length[lane, 0]) - count
        self.write(lane, without_last(self.plan, self.read(lane, votes_names(self.plan)), count), left)

    def copy(self, source: int, target: int) -> None:
        for name, _ in self.names:
            place, size = self.share(name, source, 1)
            self.cuda.copy(self.share(name, target, 1)[0], place, size, self.stream)
        self.past_length[target] = self.past_length[source]

    def view(self, lane: int) -> None:
        """Return None, because the state is on the GPU and host memory has no view of it."""

    def get_state(self) -> dict[str, NDArray[Any]]:
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in self._tensors.items()}
        for name, array in arrays.items():
            self.cuda.copy(array.ctypes.data, self.state.pointer(name), array.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return arrays

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in state.items()}
        for name, array in arrays.items():
            self.cuda.copy(self.state.pointer(name), array.ctypes.data, array.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        self.past_length[: len(past_length)] = past_length


class Phase:
    """The decoder calls of up to `tokens` tokens, with page-locked staging memory."""

    def __init__(self, backend: TensorRTState, tokens: int) -> None:
        engines, lanes = backend.engines, backend.lanes
        self.backend, self.tokens = backend, tokens
        self.cuda, self.stream = backend.cuda, backend.stream
        rows = tokens if engines.all_logits else 1
        per_lane = ((lanes, 1), np.int64)
        self.inputs = Arena(
            self.cuda,
            {"input_ids": ((lanes, tokens), np.int64), "query_length": per_lane, "past_length": per_lane},
            pinned=True,
        )
        self.outputs = Arena(self.cuda, {"logits": ((lanes, rows, engines.vocabulary), np.float32)}, pinned=True)
        self.length = Arena(self.cuda, {"present_length": per_lane})  # not read: the host counts lengths itself
        self.largest: Arena | None = None
        if tokens == 1:
            shape = (lanes, 1, engines.top_count)
            tensors = {
                "values": (shape, np.float32),
                "ids": (shape, np.int32),
                "mass": ((lanes, 1, 1), np.float32),
                "token": ((lanes, 1), np.int64),
            }
            self.largest = Arena(self.cuda, tensors, pinned=True)
        self._calls: dict[tuple[int, int] | None, Call] = {}
        self._event = self.cuda.call("cudaEventCreateWithFlags", self.cuda.api.cudaEventDisableTiming)
        weakref.finalize(self, self.cuda.api.cudaEventDestroy, self._event).atexit = False

    def mark(self) -> Pending:
        self.cuda.call("cudaEventRecord", self._event, self.stream)

        def rows() -> Rows:
            self.cuda.call("cudaEventSynchronize", self._event)
            return self

        return rows

    def top_logits(self, lane: int) -> TopLogits | None:
        if self.largest is None:
            return None
        values, ids, mass = (self.largest.array(name)[lane, 0] for name in ("values", "ids", "mass"))
        return TopLogits(ids, values, float(mass[0]), self.backend.engines.vocabulary)

    def row(self, lane: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self.outputs.array("logits")[lane, 0]
        self.cuda.copy(row.ctypes.data, self.outputs.pointer("logits") + lane * row.nbytes, row.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return row

    def logits(self, count: int, width: int) -> NDArray[np.float32]:
        """Return the logits [count, 1 or width, vocabulary] of the last decoder call. The next call overwrites them."""
        rows = width if self.backend.engines.all_logits else 1
        logits = self.outputs.array("logits", (count, rows, self.backend.engines.vocabulary))
        self.cuda.copy(logits.ctypes.data, self.outputs.pointer("logits"), logits.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return logits

    def run(
        self,
        input_ids: NDArray[np.int64] | Phase,
        query_length: NDArray[np.int64],
        past_length: NDArray[np.int64],
        first: int,
    ) -> None:
        """Enqueue a decoder call for n batch lanes; the caller waits for its end before it writes `inputs` again.

        If `input_ids` is a `Phase`, the tokens are those with the largest logits in that phase's last call.
        """
        leader = input_ids if isinstance(input_ids, Phase) else None
        count, width = query_length.shape if isinstance(input_ids, Phase) else input_ids.shape
        # A CUDA graph is of no use for prompts, whose shapes change.
        repeats = self.tokens == 1 and is_captured(first, first + count)
        key = (first, count) if repeats else None
        if key not in self._calls:
            single = self.tokens == 1 and key is not None and count == 1
            profile = self.backend.engines.single if single else DECODE if self.tokens == 1 else PREFILL
            self._calls[key] = Call(self, profile)
        arrays = {"query_length": query_length, "past_length": past_length}
        if not isinstance(input_ids, Phase):
            arrays["input_ids"] = input_ids
        for name, array in arrays.items():
            self.inputs.array(name, array.shape)[...] = array
        self._calls[key].run(width, first, count, replayed=repeats, leader=leader)


class Call:
    """The execution contexts of a decoder call, bound to some batch lanes.

    A repeated decode call is one CUDA graph. The CUDA graph contains the copies, the run of the decoder engine, and the
    run of the engine that finds the largest logits. Each call has its own execution contexts, because the shapes of a
    context must not change while a CUDA graph uses it. CUDA graphs for other numbers of lanes therefore stay valid.
    """

    def __init__(self, phase: Phase, profile: int) -> None:
        self.phase, self.backend = phase, phase.backend
        engines, scratch = self.backend.engines, self.backend.scratch.device
        self.context = engines.context(engines.decoder, profile, phase.stream, scratch)
        if phase.largest is not None:
            self.finder = engines.context(engines.top_logits, 0, phase.stream, scratch)
            for name in phase.largest.names:
                bind(self.finder, name, phase.largest.pointer(name))
        self._bound = (0, 0, 0)  # tokens, first lane, lanes
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        # Calls with tokens from the host, and calls with tokens that the call before left on the GPU.
        self._replays = [engines.replay(phase.stream, "decode") for _ in range(2)]

    def run(self, width: int, first: int, count: int, *, replayed: bool, leader: Phase | None) -> None:
        if (width, first, count) != self._bound:
            self._bind(width, first, count)
        enqueue = partial(self._enqueue, leader, count)
        if replayed:
            self._replays[leader is not None](enqueue)
        else:
            enqueue()

    def _bind(self, width: int, first: int, count: int) -> None:
        backend, phase = self.backend, self.phase
        for name in ("input_ids", "query_length", "past_length"):
            bind(self.context, name, phase.inputs.pointer(name), input_shape(backend.plan, name, count, width))
        bind(self.context, "logits", phase.outputs.pointer("logits"))
        if phase.largest is not None:
            bind(self.finder, "logits", phase.outputs.pointer("logits"), (count, 1, backend.engines.vocabulary))
        bind(self.context, "present_length", phase.length.pointer("present_length"))
        self._before, self._after = backend.bind_lanes(
            self.context, backend.names, first, count, width=width, kind="decoder"
        )
        if backend.spare is not None and not backend.engines.overwritten["decoder"] and count == backend.lanes:
            # The spare memory then has all state tensors, in the order of the state's own memory.
            self._after = [(backend.state.device, backend.spare.device, backend.state.nbytes)]
        self._bound = (width, first, count)

    def _enqueue(self, leader: Phase | None, count: int) -> None:
        inputs, stream = self.phase.inputs, self.phase.stream
        if leader is None:
            inputs.upload(stream)
        else:
            assert leader.largest is not None
            tokens = leader.largest.pointer("token")
            self.backend.cuda.copy(inputs.pointer("input_ids"), tokens, count * np.dtype(np.int64).itemsize, stream)
            inputs.upload(stream, begin="query_length")
        self.backend.enqueue(self._before)
        self.backend.engines.enqueue(self.context, stream)
        self.backend.enqueue(self._after)
        if self.phase.largest is not None:
            self.backend.engines.enqueue(self.finder, self.phase.stream)
            self.phase.largest.download(self.phase.stream)


class Merge:
    """The merge engine, which compresses the KV caches of some batch lanes to their budgets of slots.

    The merge engine has its own execution context, because the shapes of a context must not change while a CUDA graph
    uses it. The CUDA graph of a merge (copies and engine run) is kept while the lanes stay the same.
    """

    def __init__(self, backend: TensorRTState) -> None:
        self.backend, engines = backend, backend.engines
        self.context = engines.context(engines.merge, 0, backend.stream, backend.scratch.device)
        merged = set(names(engines.merge))
        self._names = [pair for pair in backend.names if pair[0] in merged]
        self._bound = (0, 0)
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        self._replay = engines.replay(backend.stream, "merging")

    def run(self, first: int, last: int) -> None:
        if (first, last) != self._bound:
            backend = self.backend
            self._before, self._after = backend.bind_lanes(
                self.context, self._names, first, last - first, width=1, kind="merge"
            )
            self._bound = (first, last)
            self._replay = backend.engines.replay(backend.stream, "merging")
        self._replay(self._enqueue)

    def _enqueue(self) -> None:
        self.backend.enqueue(self._before)
        self.backend.engines.enqueue(self.context, self.backend.stream)
        self.backend.enqueue(self._after)
