"""A model on ONNX Runtime's CPU or CUDA provider, whose sessions update the KV cache in place.

The past and the present of a state tensor (its values before and after a call) are one buffer on the device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.adapters import ROWS
from kvexport.backends.lane_state import fill, is_captured, read_used, slot_places, votes_names, without_last
from kvexport.backends.model_state import ModelState, Pending
from kvexport.backends.onnxruntime.bindings import DeviceRows, SmallTensors, bind, in_one_piece
from kvexport.backends.onnxruntime.device_array import Array, DeviceArray, copy, lanes_of, read, write
from kvexport.backends.onnxruntime.model_sessions import DECODER, MERGE, NO_GRAPH, TOP_LOGITS, Sessions
from kvexport.backends.rows import Rows
from kvexport.errors import first_line
from kvexport.images.rows import CallImages
from kvexport.plan.cache import CachePlan

_NO_ROWS = range(0)


class _BoundCall(NamedTuple):
    session: Any
    binding: Any  # ONNX Runtime binding
    graph: int | None  # id of the call's CUDA graph, or NO_GRAPH; None if the session captures none
    inputs: SmallTensors | None = None  # tensors that the host writes
    outputs: SmallTensors | None = None  # tensors that the host reads
    logits: Array | None = None
    images: tuple[Array, ...] = ()  # image embeddings and their places: kept alive here, as the binding does not


class OnnxRuntimeState(ModelState):
    """KV caches of some batch lanes: numpy arrays on the CPU, device arrays on a GPU."""

    def __init__(self, model: Sessions, plan: CachePlan, lanes: int) -> None:
        self.lanes = lanes
        self._model, self._plan = model, plan
        tensors = {
            name: (layer.shapes(lanes)[kind], layer.dtypes()[kind]) for name, _, layer, kind in plan.state_names()
        }
        self.state: dict[str, Any] = (
            {name: model.zeros(*tensor) for name, tensor in tensors.items()}
            if model.device != "cpu"
            else in_one_piece(tensors)
        )
        self._votes = votes_names(plan)
        self._names = [(name, present) for name, present, *_ in plan.state_names()]
        self._emptied = {
            tensor.past(i)
            for i, layer in enumerate(plan.caches)
            for tensor in layer.state
            if tensor.name == "votes" or tensor.slot_axis is None
        } | {tensor.past(x.place) for x in plan.states for tensor in x.state}
        self.past_length: Any = model.zeros((lanes, 1), np.dtype(np.int64))
        self._adapters = [_NO_ROWS] * lanes  # each lane's LoRA adapter: its rows in the matrices of all adapters
        # The inputs `adapter_rows`, by the number of rows of LoRA matrices that a decoder call reads: all rows, or, if
        # no lane of the call has an adapter, only row 0, which contains zeros.
        rows = {model.adapters.rows, 1} if model.adapters.tensors else set[int]()
        self._selected: dict[int, Any] = {n: model.zeros((lanes, 1, n), model.adapters.dtype) for n in rows}
        # The bound calls of each session. Decoder calls of one token of the first n lanes are kept. Of all other
        # decoder calls only the last one is kept.
        self._calls: dict[str, dict[Hashable, _BoundCall]] = defaultdict(dict)
        self._other: Hashable = None
        self.top_logits = None if model.zeros is np.zeros else model.top_count
        self.runs_ahead = self.top_logits is not None
        # Buffers that all decoder calls of one token share. There are two of each, used by turns: a call that begins
        # before the host has read the logits of the call before must not overwrite them.
        self._step_logits: list[Any] = [None, None]  # [lanes, 1, vocabulary]
        self._step_inputs: list[SmallTensors | None] = [None, None]
        self._latest = (0, 0, 0)  # first lane, lanes and turn of the latest call of one token
        self._enqueued = self._ended = 0  # runs that were enqueued without a wait, and how many have surely ended
        self._thread = threading.local()  # `graphs`: CUDA graphs that this thread captured; others must capture too

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Empty the KV caches of batch lanes first <= lane < last.

        A state of zeros is an empty KV cache. On a GPU, only the votes of the slots become zero. (Votes are the number
        of tokens that a slot stands for; attention ignores slots with 0 votes.) This is fast, because votes are a
        hundredth of the state's bytes.
        """
        self._settle()
        for name, array in self.state.items():
            if poisoned or name in self._emptied or not isinstance(array, DeviceArray):
                write(self._lanes_of(array, first, last), 0)
        write(self._lanes_of(self.past_length, first, last), 0)

    def _lanes_of(self, array: Array, first: int, last: int) -> Array:
        whole = first == 0 and last == self.lanes
        return array if whole else lanes_of(array, slice(first, last), self._model.decoder)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        return self._run_decoder(self._send(input_ids, query_length, first))

    def decode_images(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int, images: CallImages
    ) -> NDArray[np.float32]:
        return self._run_decoder(self._send(input_ids, query_length, first, images=images))

    def _run_decoder(self, call: _BoundCall) -> NDArray[np.float32]:
        assert call.logits is not None
        self._model.run(DECODER, call.binding, call.graph)
        return read(call.logits)

    def _send(
        self,
        input_ids: NDArray[np.int64],
        query_length: NDArray[np.int64],
        first: int,
        turn: int = 0,
        images: CallImages | None = None,
    ) -> _BoundCall:
        self._settle()
        count, tokens = input_ids.shape
        call = self._decoder(first, count, tokens, turn, images)
        assert call.inputs is not None
        call.inputs.arrays["input_ids"][...] = input_ids
        call.inputs.arrays["query_length"][...] = query_length
        call.inputs.send()
        return call

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        self._send(input_ids, query_length, first)
        return self._enqueue(first, len(input_ids), 0)()

    def begin(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Pending:
        for turn in (1, 0):  # later calls of both turns have these lengths; their tokens come from the device
            self._send(input_ids, query_length, first, turn)
        return self._enqueue(first, len(input_ids), 0)

    def follow(self) -> Pending:
        first, count, turn = self._latest
        return self._enqueue(first, count, 1 - turn)

    def _enqueue(self, first: int, count: int, turn: int) -> Pending:
        call = self._decoder(first, count, 1, turn)
        logits = call.logits
        assert isinstance(logits, DeviceArray)
        self._run_on(DECODER, call)
        # The logits of any number of lanes begin at the same address.
        call = self._ready(TOP_LOGITS, (count, turn), partial(self._bind_finder, logits, turn))
        outputs = call.outputs
        assert outputs is not None
        self._run_on(TOP_LOGITS, call)
        self._latest = first, count, turn
        number, wait = self._enqueued, self._model.stream.mark()

        def rows() -> Rows:
            wait()
            self._ended = max(self._ended, number)
            return DeviceRows(logits, outputs.fetch())

        return rows

    def _run_on(self, name: str, call: _BoundCall) -> None:
        self._model.run(name, call.binding, call.graph, wait=False)
        self._enqueued += 1

    def _settle(self) -> None:
        """Wait for all runs that were enqueued on the device, before the host reads or writes their tensors."""
        if self._ended != self._enqueued:
            self._model.stream.wait()
            self._ended = self._enqueued

    def merge(self, first: int, last: int) -> None:
        call = self._ready(MERGE, (first, last), partial(self._bind_merge, first, last))
        if self._ended != self._enqueued:
            self._run_on(MERGE, call)
        else:
            self._model.run(MERGE, call.binding, call.graph)

    def grown(self, lanes: int) -> OnnxRuntimeState:
        self._settle()
        larger = OnnxRuntimeState(self._model, self._plan, lanes)
        for name, array in self.state.items():
            copy(array, larger.state[name], target_lanes=slice(self.lanes))
        copy(self.past_length, larger.past_length, target_lanes=slice(self.lanes))
        for lane, rows in enumerate(self._adapters):
            larger.adapt(lane, rows)
        return larger

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        self._settle()
        return read_used(self._plan, lambda name: read(self._lanes_of(self.state[name], lane, lane + 1))[0], names)

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        self._settle()
        places = slot_places(self._plan)
        for name, values in state.items():
            place = self._lanes_of(self.state[name], lane, lane + 1)
            if isinstance(place, DeviceArray):
                whole = np.empty(place.shape, place.dtype)
                fill(whole[0], values, places[name])
                place.write(whole)
            else:
                fill(place[0], values, places[name])
        if past_length is not None:
            write(self._lanes_of(self.past_length, lane, lane + 1), past_length)

    def rollback(self, lane: int, count: int) -> None:
        self._settle()
        length = self._lanes_of(self.past_length, lane, lane + 1)
        left = int(read(length)[0, 0]) - count
        if isinstance(length, DeviceArray):
            self.write(lane, without_last(self._plan, self.read(lane, self._votes), count), left)
            return
        for name, cache in zip(self._votes, self._plan.caches, strict=True):
            votes = self.state[name][lane].reshape(cache.kv_heads, -1)  # only heads of one capacity are rolled back
            used = np.count_nonzero(votes[0])  # every head appends the same tokens
            votes[:, used - count : used] = 0
        write(length, left)

    def copy(self, source: int, target: int) -> None:
        self._settle()
        for array in (*self.state.values(), self.past_length):
            copy(array, array, slice(source, source + 1), slice(target, target + 1))
        self.adapt(target, self._adapters[source])

    def adapt(self, lane: int, rows: range = _NO_ROWS) -> None:
        if self._adapters[lane] == rows:
            return
        self._settle()
        self._adapters[lane] = rows
        count = self._model.adapters.rows
        selected = np.zeros((1, 1, count), self._model.adapters.dtype)
        selected[..., rows.start : rows.stop] = 1
        write(self._lanes_of(self._selected[count], lane, lane + 1), selected)

    def view(self, lane: int) -> dict[str, NDArray[Any]] | None:
        if isinstance(self.past_length, DeviceArray):
            return None
        return {name: array[lane] for name, array in self.state.items()}

    def get_state(self) -> dict[str, NDArray[Any]]:
        self._settle()
        return {name: np.array(read(array)) for name, array in self.state.items()}

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        self._settle()
        for name, array in state.items():
            write(self._lanes_of(self.state[name], 0, len(array)), array)
        write(self._lanes_of(self.past_length, 0, len(past_length)), past_length)

    def _decoder(
        self, first: int, count: int, tokens: int, turn: int = 0, images: CallImages | None = None
    ) -> _BoundCall:
        adapted = any(self._adapters[first : first + count])
        if images is not None:
            return self._bind_decoder(
                slice(first, first + count), tokens, turn, stays=False, adapted=adapted, images=images
            )
        key, stays = (first, count, tokens, adapted, turn), tokens == 1 and first == 0
        if not stays and key != self._other:
            self._calls[DECODER].pop(self._other, None)
            self._other = key
        lanes = slice(first, first + count)
        return self._ready(DECODER, key, partial(self._bind_decoder, lanes, tokens, turn, stays, adapted=adapted))

    def _ready(self, name: str, key: Hashable, bind: Callable[[], _BoundCall]) -> _BoundCall:
        """Return the bound session stored under `key`; the first call makes it and captures its CUDA graph."""
        kept = self._calls[name]
        call = kept.get(key)
        if call is None or call.session is not self._model.session(name):
            call = kept[key] = bind()
        if call.graph is None:
            return call
        captured: set[int] = self._thread.__dict__.setdefault("graphs", {NO_GRAPH})
        if call.graph in captured:
            return call
        problem = self._capture(name, call)
        if not problem:
            captured.add(call.graph)
            return call
        call = None  # releases the old session before the new one is opened
        kept.clear()
        self._model.without_graphs(name, problem)
        call = kept[key] = bind()
        return call

    def _capture(self, name: str, call: _BoundCall) -> str:
        """Let ONNX Runtime capture a session's run as a CUDA graph; return why the capture failed, or "".

        The capture runs the ONNX graph several times, in place. A captured decoder call has no tokens, so it leaves
        every sequence unchanged. A second merge of a merged KV cache changes nothing.
        """
        self._settle()
        with nullcontext() if call.inputs is None else call.inputs.kept():
            if call.inputs is not None:
                call.inputs.arrays["query_length"][...] = 0
                call.inputs.send()
            try:
                self._model.run(name, call.binding, call.graph)
            except Exception as error:
                return first_line(error)
        return ""

    def _bind_decoder(
        self, lanes: slice, tokens: int, turn: int, stays: bool, *, adapted: bool, images: CallImages | None = None
    ) -> _BoundCall:
        session, count = self._model.decoder, lanes.stop - lanes.start
        inputs, logits = self._inputs(count, tokens, turn), self._logits(count, tokens, turn)
        binding = session.io_binding()
        inputs.bind(binding, output=False)
        bind(binding, None, "logits", logits)
        bind(binding, "past_length", "present_length", self.past_length, lanes)
        for name, present in self._names:
            bind(binding, name, present, self.state[name], lanes)
        placed: tuple[Array, ...] = ()
        if self._model.images is not None:
            images = images or CallImages.none(self._model.images, count, tokens)
            arrays = {name: self._model.on_device(array) for name, array in images.inputs().items()}
            placed = tuple(arrays.values())
            for name, array in arrays.items():
                bind(binding, name, None, array)
        if self._selected:
            rows = self._model.adapters.rows if adapted else 1
            bind(binding, ROWS, None, self._selected[rows], lanes)
            for name, array in self._model.adapter_tensors.items():
                bind(binding, name, None, array, slice(rows))
        return _BoundCall(session, binding, self._model.new_graph(DECODER, stays), inputs, logits=logits, images=placed)

    def _bind_merge(self, first: int, last: int) -> _BoundCall:
        session = self._model.merge
        assert session is not None
        binding = session.io_binding()
        inputs = {i.name for i in session.get_inputs()}
        for name, present in self._names:
            if name in inputs:
                bind(binding, name, present, self.state[name], slice(first, last))
        return _BoundCall(session, binding, self._model.new_graph(MERGE, is_captured(first, last)))

    def _inputs(self, count: int, tokens: int, turn: int) -> SmallTensors:
        shared = tokens == 1 and self.top_logits is not None
        if shared and (kept := self._step_inputs[turn]) is not None:
            return kept.of_lanes(count)
        lanes = self.lanes if shared else count
        shapes = {"input_ids": (lanes, tokens), "query_length": (lanes, 1)}
        inputs = SmallTensors(self._model.zeros, {name: (shape, np.dtype(np.int64)) for name, shape in shapes.items()})
        if not shared:
            return inputs
        self._step_inputs[turn] = inputs
        return inputs.of_lanes(count)

    def _bind_finder(self, logits: Array, turn: int) -> _BoundCall:
        session, count, lanes = self._model.finder, self._model.top_count, logits.shape[0]
        tensors = {
            "values": ((lanes, 1, count), np.dtype(np.float32)),
            "ids": ((lanes, 1, count), np.dtype(np.int32)),
            "mass": ((lanes, 1, 1), np.dtype(np.float32)),
        }
        outputs = SmallTensors(self._model.zeros, tensors)
        binding = session.io_binding()
        bind(binding, "logits", None, logits)
        outputs.bind(binding, output=True)
        binding.bind_output("token", *self._inputs(lanes, 1, 1 - turn).place("input_ids"))
        return _BoundCall(session, binding, self._model.new_graph(TOP_LOGITS, True), outputs=outputs)

    def _logits(self, count: int, tokens: int, turn: int) -> Array:
        model, single = self._model, np.dtype(np.float32)
        if tokens > 1:
            rows = tokens if model.all_logits else 1
            wide: Array = model.zeros((count, rows, model.vocabulary), single)
            return wide
        if self._step_logits[turn] is None:
            self._step_logits[turn] = model.zeros((self.lanes, 1, model.vocabulary), single)
        return self._lanes_of(self._step_logits[turn], 0, count)


class LoadedModel(Sessions):
    def new_state(self, plan: CachePlan, lanes: int) -> OnnxRuntimeState:
        return OnnxRuntimeState(self, plan, lanes)
