"""A model on TensorRT engines, with its KV caches on the GPU.

If one plugin updates a state tensor, its input (past) and output (present) have the same address. If several nodes of
an engine update the tensor, present has another address and is copied back after the run, because TensorRT may run the
nodes in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.lane_state import fill, is_captured, read_used, slot_places, votes_names, without_last
from kvexport.backends.model_state import Memory, ModelState, Pending
from kvexport.backends.rows import Rows
from kvexport.backends.tensorrt.calls import Copy, Merge, Phase
from kvexport.backends.tensorrt.cuda import ALIGNMENT, Arena
from kvexport.backends.tensorrt.engines import input_shape
from kvexport.backends.tensorrt.plans import Plans, bind, names
from kvexport.plan.cache import CachePlan


class LoadedModel(Plans):
    """The TensorRT engines of one exported model, for any number of states (batches of KV caches)."""

    in_host_memory = False

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> TensorRTState:
        return TensorRTState(self, plan, lanes)


class TensorRTState(ModelState):
    """KV caches of a fixed number of batch lanes on the GPU, and the TensorRT engines that advance them."""

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
        self.runs_ahead = engines.top_logits is not None and "token" in names(engines.top_logits)
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
        """Empty the KV caches of batch lanes first <= lane < last; a state of zeros is an empty KV cache."""
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
        """Bind the state tensors of some batch lanes to a TensorRT execution context; return the copies to make.

        The copies, before and after the engine's run, are for lanes whose address is not aligned, and for tensors that
        the run must not overwrite.
        """
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
        """Return None: the state is on the GPU, so host memory has no view of it."""

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
