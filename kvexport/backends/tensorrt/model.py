"""A model on TensorRT engines, with its KV caches on the GPU.

If a plugin updates a state tensor, past and present have one address. If several nodes update it, present has another
address and is copied back, because TensorRT may run the nodes in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.lane_state import fill, is_captured, read_used, slot_axes, votes_names, without_last
from kvexport.backends.model_state import Memory, ModelState
from kvexport.backends.rows import Rows, TopLogits
from kvexport.backends.tensorrt.cuda import ALIGNMENT, Arena
from kvexport.backends.tensorrt.engines import DECODE, PREFILL, input_shape
from kvexport.backends.tensorrt.plans import Plans, bind, names
from kvexport.cache import CachePlan

Copy = tuple[int, int, int]  # target address, source address, bytes


class LoadedModel(Plans):
    """The TensorRT engines of one exported model, for any number of states of KV caches."""

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> TensorRTState:
        """Return empty KV caches for `lanes` sequences on the GPU."""
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
        self._tensors = tensors
        self._phases: dict[bool, _Phase] = {}
        self._merges: dict[tuple[int, int] | None, _Merge] = {}
        # Engines run one after another in the stream, so all execution contexts share one piece of scratch memory.
        self.scratch = Arena(self.cuda, {"memory": ((engines.memory_size,), np.uint8)})
        # Memory for present tensors that must not overwrite past, and for lanes whose address is not aligned.
        kept = [name for name in tensors if name not in engines.overwritten["decoder"]]
        if engines.merge is not None:
            merged = set(names(engines.merge)) - engines.overwritten["merge"]
            kept = [name for name in tensors if name in {*kept, *merged}]
        self.spare = Arena(self.cuda, {name: tensors[name] for name in kept}) if kept else None
        unaligned = any(self.state.size(name) // lanes % ALIGNMENT for name, _ in self.names)
        self.gathered = Arena(self.cuda, tensors) if unaligned and lanes > 1 else None
        self.clear(0, lanes)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Empty the KV caches of lanes first <= lane < last by zeroing them; an all-zero state is an empty cache."""
        if last - first == self.lanes:
            self.cuda.clear(self.state.device, self.state.nbytes, self.stream)
        else:
            for name, _ in self.names:
                place, size = self.share(name, first, last - first)
                self.cuda.clear(place, size, self.stream)
        self.past_length[first:last] = 0

    def share(self, name: str, first: int, count: int) -> tuple[int, int]:
        """Return the GPU address and the size in bytes of `count` batch lanes of a state tensor."""
        share = self.state.size(name) // self.lanes
        return self.state.pointer(name) + first * share, count * share

    def bind_lanes(
        self, context: Any, names: list[tuple[str, str]], first: int, count: int, *, width: int, kind: str
    ) -> tuple[list[Copy], list[Copy]]:
        """Bind the state tensors of some batch lanes to a TensorRT execution context.

        Lanes are copied if their address is not aligned, or if the run must not overwrite them.

        Args:
            context: The execution context.
            names: The input and output names of the state tensors.
            first: The first lane.
            count: The number of lanes.
            width: The tokens of each lane.
            kind: The engine of the context: decoder or merge.

        Returns:
            The copies that are needed before a run, and those after it.
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
        """Enqueue copies between GPU addresses on the CUDA stream of the engines."""
        for target, source, size in copies:
            self.cuda.copy(target, source, size, self.stream)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append tokens to the sequences of batch lanes and return logits; see `LaneState.decode`."""
        return self._run(input_ids, query_length, first).logits(*input_ids.shape)

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """Append one token to each batch lane's sequence and leave the logits on the GPU; see `ModelState.step`."""
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
        """Compress the KV cache of each lane first <= lane < last to its budget of slots; see `LaneState.merge`."""
        key = (first, last) if is_captured(first, last) else None
        if key not in self._merges:
            self._merges[key] = _Merge(self)
        self._merges[key].run(first, last)

    def grown(self, lanes: int) -> TensorRTState:
        """Return a state with more batch lanes, the first of which are copies of these; see `ModelState.grown`."""
        larger = TensorRTState(self.engines, self.plan, lanes)
        self.cuda.synchronize(self.stream)
        for name, _ in self.names:
            place, size = self.share(name, 0, self.lanes)
            self.cuda.copy(larger.state.pointer(name), place, size, larger.stream)
        self.cuda.synchronize(larger.stream)
        larger.past_length[: self.lanes] = self.past_length
        return larger

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of one lane's state tensors in host memory; see `ModelState.read`."""

        def whole(name: str) -> NDArray[Any]:
            shape, dtype = self._tensors[name]
            array: NDArray[Any] = np.empty(shape[1:], dtype)
            place, size = self.share(name, lane, 1)
            self.cuda.copy(array.ctypes.data, place, size, self.stream)
            self.cuda.synchronize(self.stream)
            return array

        return read_used(self.plan, whole, names)

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        """Overwrite one lane's state tensors with saved ones; see `ModelState.write`."""
        axes, arrays = slot_axes(self.plan), []
        for name, values in state.items():
            shape, dtype = self._tensors[name]
            array: NDArray[Any] = np.empty(shape[1:], dtype)
            fill(array, values, axes[name])
            place, size = self.share(name, lane, 1)
            self.cuda.copy(place, array.ctypes.data, size, self.stream)
            arrays.append(array)  # keeps the memory until it is copied
        self.cuda.synchronize(self.stream)
        if past_length is not None:
            self.past_length[lane] = past_length

    def rollback(self, lane: int, count: int) -> None:
        """Remove the last `count` tokens from one lane's KV cache; see `ModelState.rollback`."""
        left = int(self.past_length[lane, 0]) - count
        self.write(lane, without_last(self.read(lane, votes_names(self.plan)), count), left)

    def copy(self, source: int, target: int) -> None:
        """Copy the state tensors of one batch lane over those of another; see `ModelState.copy`."""
        for name, _ in self.names:
            place, size = self.share(name, source, 1)
            self.cuda.copy(self.share(name, target, 1)[0], place, size, self.stream)
        self.past_length[target] = self.past_length[source]

    def view(self, lane: int) -> None:
        """Return None: there are no views of a lane's state in host memory, because the state is on the GPU."""

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all state tensors (KV caches of all lanes) by graph input name."""
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in self._tensors.items()}
        for name, array in arrays.items():
            self.cuda.copy(array.ctypes.data, self.state.pointer(name), array.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return arrays

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Overwrite the state tensors of the first n batch lanes; see `ModelState.set_state`."""
        arrays = {name: np.ascontiguousarray(array) for name, array in state.items()}
        for name, array in arrays.items():
            self.cuda.copy(self.state.pointer(name), array.ctypes.data, array.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        self.past_length[: len(past_length)] = past_length


class _Phase:
    """The decoder's calls of one token (decode) or of up to `tokens` tokens (prefill), and their staging memory.

    The staging memory is page-locked. Whole rows of logits are fetched one by one (`Rows`).
    """

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
        self.length = Arena(self.cuda, {"present_length": per_lane})  # unused: the host counts lengths
        self.largest: Arena | None = None
        if tokens == 1 and engines.top_logits is not None:
            shape = (lanes, 1, engines.top_count)
            tensors = {"values": (shape, np.float32), "ids": (shape, np.int32), "mass": ((lanes, 1, 1), np.float32)}
            self.largest = Arena(self.cuda, tensors, pinned=True)
        self._calls: dict[tuple[int, int] | None, _Call] = {}

    def top_logits(self, lane: int) -> TopLogits | None:
        """Return the largest logits of a lane with their token ids; see `Rows.top_logits`."""
        if self.largest is None:
            return None
        values, ids, mass = (self.largest.array(name)[lane, 0] for name in ("values", "ids", "mass"))
        return TopLogits(ids, values, float(mass[0]), self.backend.engines.vocabulary)

    def row(self, lane: int) -> NDArray[np.float32]:
        """Return all logits [vocabulary] of a lane, in host memory; see `Rows.row`."""
        row: NDArray[np.float32] = self.outputs.array("logits")[lane, 0]
        self.cuda.copy(row.ctypes.data, self.outputs.pointer("logits") + lane * row.nbytes, row.nbytes, self.stream)
        self.cuda.synchronize(self.stream)
        return row

    def logits(self, count: int, width: int) -> NDArray[np.float32]:
        """Return the logits [count, 1 or width, vocabulary] of the last decoder call; the next call overwrites them."""
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
        """Enqueue a decoder call for n batch lanes; wait for the stream before `inputs` is written again.

        Args:
            input_ids: [n, T] token ids.
            query_length: [n, 1], the number of real tokens of each lane.
            past_length: [n, 1], the number of tokens that each lane has seen.
            first: The first lane.
        """
        count, width = input_ids.shape
        # The shapes of prompts change, and streamed weights are copied outside of the stream.
        repeats = self.tokens == 1 and not self.backend.engines.streams_weights and is_captured(first, first + count)
        key = (first, count) if repeats else None
        if key not in self._calls:
            single = self.tokens == 1 and key is not None and count == 1
            profile = self.backend.engines.single if single else DECODE if self.tokens == 1 else PREFILL
            self._calls[key] = _Call(self, profile)
        for name, array in (("input_ids", input_ids), ("query_length", query_length), ("past_length", past_length)):
            self.inputs.array(name, array.shape)[...] = array
        self._calls[key].run(width, first, count, replayed=repeats)


class _Call:
    """The execution contexts of a decoder call, and their bindings to some batch lanes.

    A repeated decode call is one CUDA graph of its copies and engine runs, with those for the largest logits. Each call
    has its own contexts, because a CUDA graph requires that the shapes of its contexts do not change. After a change of
    the number of lanes, earlier CUDA graphs therefore remain valid.
    """

    def __init__(self, phase: _Phase, profile: int) -> None:
        self.phase, self.backend = phase, phase.backend
        engines, scratch = self.backend.engines, self.backend.scratch.device
        self.context = engines.context(engines.decoder, profile, phase.stream, scratch)
        if phase.largest is not None:
            self.finder = engines.context(engines.top_logits, 0, phase.stream, scratch)
            for name in ("values", "ids", "mass"):
                bind(self.finder, name, phase.largest.pointer(name))
        self._bound = (0, 0, 0)  # tokens, first lane, lanes
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        self._replay = engines.replay(phase.stream, "decode")

    def run(self, width: int, first: int, count: int, *, replayed: bool) -> None:
        """Enqueue the call for `count` lanes from `first` on, of `width` tokens each.

        Args:
            width: The tokens of each lane.
            first: The first lane.
            count: The number of lanes.
            replayed: Whether the call becomes a CUDA graph. All its runs then have the same lanes and width.
        """
        if (width, first, count) != self._bound:
            self._bind(width, first, count)
        if replayed:
            self._replay(self._enqueue)
        else:
            self._enqueue()

    def _bind(self, width: int, first: int, count: int) -> None:
        """Bind all inputs and outputs of a decoder call for `count` lanes from `first` on."""
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
            # The spare memory then has all tensors, in the order of the state's.
            self._after = [(backend.state.device, backend.spare.device, backend.state.nbytes)]
        self._bound = (width, first, count)

    def _enqueue(self) -> None:
        self.phase.inputs.upload(self.phase.stream)
        self.backend.enqueue(self._before)
        self.backend.engines.enqueue(self.context, self.phase.stream)
        self.backend.enqueue(self._after)
        if self.phase.largest is not None:
            self.backend.engines.enqueue(self.finder, self.phase.stream)
            self.phase.largest.download(self.phase.stream)


class _Merge:
    """The merge engine, which compresses the KV caches of some batch lanes to their budgets.

    It has its own execution context, because a CUDA graph requires that the shapes of its context do not change. The
    CUDA graph of its copies and its run is kept while the lanes stay the same.
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
        """Enqueue the compression (merge) of the KV caches of lanes first <= lane < last."""
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
