"""The graphs on ONNX Runtime's CPU or CUDA provider, with the state bound in place: input and output are one buffer, on
the device that computes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.base import Memory
from kvexport.backends.lane_state import fill, read_used, slot_axes, votes_names, without_last
from kvexport.backends.onnxruntime.bindings import DeviceRows, bind, in_one_piece
from kvexport.backends.onnxruntime.device_array import Array, DeviceArray, copy, part, read, write
from kvexport.backends.onnxruntime.session import first_line, open_session
from kvexport.backends.rows import Rows
from kvexport.cache import CachePlan
from kvexport.errors import EnvironmentProblem

NO_GRAPH = -1  # the id of a run that neither captures a CUDA graph nor replays one


class _Decoder(NamedTuple):
    """The decoder bound for calls of some lanes with so many tokens. graph: the id of its CUDA graph, or NO_GRAPH; None
    where there are no CUDA graphs."""

    lanes: slice
    tokens: int
    binding: Any
    arrays: dict[str, Array]
    graph: int | None


class OnnxRuntimeState:
    """State tensors of a fixed number of lanes and the sessions that advance them (see `ModelState`). On the CPU
    `state` and `past_length` are numpy arrays."""

    def __init__(self, sessions: Sessions, plan: CachePlan, lanes: int, memory: Memory | None = None) -> None:
        self.lanes, self._memory = lanes, memory
        self._sessions, self._plan = sessions, plan
        tensors = {
            name: (layer.shapes(lanes)[kind], layer.dtypes()[kind]) for name, _, layer, kind in plan.state_names()
        }
        self.state: dict[str, Any] = (
            {name: sessions.zeros(*tensor) for name, tensor in tensors.items()}
            if sessions.device != "cpu"
            else in_one_piece(tensors, memory)
        )
        self._votes = votes_names(plan)
        self._names = [(name, present) for name, present, *_ in plan.state_names()]
        self._emptied = {
            tensor.past(i)
            for i, layer in enumerate(plan.layers)
            for tensor in layer.state
            if tensor.name == "votes" or tensor.slot_axis is None
        }
        self.past_length: Any = sessions.zeros((lanes, 1), np.dtype(np.int64))
        # Decoder bindings that stay: of one token of each of the first n lanes, by n, and the last other one. Merge
        # bindings stay per run of lanes.
        self._decoders: dict[int, _Decoder] = {}
        self._other: _Decoder | None = None
        self._step_logits: Any = None  # [lanes, 1, vocabulary], shared by all calls of one token
        self._mergers: dict[tuple[int, int], Any] = {}
        self._finder: tuple[Array, Any, dict[str, Array]] | None = (
            None  # of the largest of these logits: its binding, its outputs
        )
        self.top_logits = None if sessions.zeros is np.zeros else sessions.top_count
        self._thread = threading.local()  # graphs: those captured; ONNX Runtime captures them for each thread anew

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """See `ModelState.clear`: an all-zero state is an empty cache. On a device, of tensors of slots the votes
        alone become zero: other finite values of a slot without votes have no effect, and votes are a hundredth of the
        whole."""
        for name, array in self.state.items():
            if poisoned or name in self._emptied or not isinstance(array, DeviceArray):
                write(self._part(array, first, last), 0)
        write(self._part(self.past_length, first, last), 0)

    def _part(self, array: Array, first: int, last: int) -> Array:
        whole = first == 0 and last == self.lanes
        return array if whole else part(array, slice(first, last), self._sessions.decoder)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """See `ModelState.decode`."""
        return read(self._run_decoder(input_ids, query_length, first))

    def _run_decoder(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int) -> Array:
        decoder = self._decoder(first, *input_ids.shape)
        write(decoder.arrays["input_ids"], input_ids)
        write(decoder.arrays["query_length"], query_length)
        self._sessions.run(self._sessions.decoder, decoder.binding, decoder.graph)
        return decoder.arrays["logits"]

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """See `ModelState.step`."""
        logits = self._run_decoder(input_ids, query_length, first)
        assert isinstance(logits, DeviceArray)
        if self._finder is None or self._finder[0] is not logits:
            self._finder = (logits, *self._bind_finder(logits))
        _, binding, found = self._finder
        self._sessions.run(self._sessions.finder, binding, None)
        return DeviceRows(logits, {name: read(array) for name, array in found.items()})

    def _bind_finder(self, logits: Array) -> tuple[Any, dict[str, Array]]:
        zeros, count, lanes = self._sessions.zeros, self._sessions.top_count, logits.shape[0]
        found: dict[str, Array] = {
            "values": zeros((lanes, 1, count), np.dtype(np.float32)),
            "ids": zeros((lanes, 1, count), np.dtype(np.int32)),
            "mass": zeros((lanes, 1, 1), np.dtype(np.float32)),
        }
        binding = self._sessions.finder.io_binding()
        bind(binding, "logits", None, logits)
        for name, array in found.items():
            bind(binding, None, name, array)
        return binding, found

    def merge(self, first: int, last: int) -> None:
        """See `ModelState.merge`."""
        session = self._sessions.merge
        assert session is not None
        if (first, last) not in self._mergers:
            binding = session.io_binding()
            wanted = {i.name for i in session.get_inputs()}
            for name, present in self._names:
                if name in wanted:
                    bind(binding, name, present, self.state[name], slice(first, last))
            self._mergers[(first, last)] = binding
        self._sessions.run(session, self._mergers[(first, last)], None)

    def grown(self, lanes: int) -> OnnxRuntimeState:
        """See `ModelState.grown`."""
        more = OnnxRuntimeState(self._sessions, self._plan, lanes, self._memory)
        for name, array in self.state.items():
            copy(array, more.state[name], given=slice(self.lanes))
        copy(self.past_length, more.past_length, given=slice(self.lanes))
        return more

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """See `ModelState.read`."""
        return read_used(self._plan, lambda name: read(self._part(self.state[name], lane, lane + 1))[0], names)

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        """See `ModelState.write`."""
        axes = slot_axes(self._plan)
        for name, values in state.items():
            place = self._part(self.state[name], lane, lane + 1)
            if isinstance(place, DeviceArray):
                whole = np.empty(place.shape, place.dtype)
                fill(whole[0], values, axes[name])
                place.write(whole)
            else:
                fill(place[0], values, axes[name])
        if past_length is not None:
            write(self._part(self.past_length, lane, lane + 1), past_length)

    def rollback(self, lane: int, count: int) -> None:
        """See `ModelState.rollback`."""
        length = self._part(self.past_length, lane, lane + 1)
        left = int(read(length)[0, 0]) - count
        if isinstance(length, DeviceArray):
            self.write(lane, without_last(self.read(lane, self._votes), count), left)
            return
        for name in self._votes:
            votes = self.state[name][lane]
            used = np.count_nonzero(votes[0])  # every head appends the same tokens
            votes[:, used - count : used] = 0
        write(length, left)

    def copy(self, source: int, target: int) -> None:
        """See `ModelState.copy`."""
        for array in (*self.state.values(), self.past_length):
            copy(array, array, slice(source, source + 1), slice(target, target + 1))

    def view(self, lane: int) -> dict[str, NDArray[Any]] | None:
        """See `ModelState.view`."""
        if isinstance(self.past_length, DeviceArray):
            return None
        return {name: array[lane] for name, array in self.state.items()}

    def get_state(self) -> dict[str, NDArray[Any]]:
        """See `ModelState.get_state`."""
        return {name: np.array(read(array)) for name, array in self.state.items()}

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """See `ModelState.set_state`."""
        for name, array in state.items():
            write(self._part(self.state[name], 0, len(array)), array)
        write(self._part(self.past_length, 0, len(past_length)), past_length)

    def _decoder(self, first: int, count: int, tokens: int) -> _Decoder:
        """The decoder bound to the state of some lanes, its CUDA graph captured where it has one."""
        known = self._decoders.get(count) if tokens == 1 and first == 0 else self._other
        if known is None or known.tokens != tokens or known.lanes != slice(first, first + count):
            known = self._keep(self._bind_decoder(slice(first, first + count), tokens))
        if known.graph is None:
            return known
        captured: set[int] = self._thread.__dict__.setdefault("graphs", {NO_GRAPH})
        if known.graph in captured:
            return known
        captured.add(known.graph)
        problem = self._capture(known)
        if not problem:
            return known
        # The old session goes before the new one comes.
        known = self._other = None
        self._decoders.clear()
        self._sessions.without_graphs(problem)
        return self._keep(self._bind_decoder(slice(first, first + count), tokens))

    def _keep(self, decoder: _Decoder) -> _Decoder:
        if decoder.tokens == 1 and decoder.lanes.start == 0:
            self._decoders[decoder.lanes.stop] = decoder
        else:
            self._other = decoder
        return decoder

    def _capture(self, decoder: _Decoder) -> str:
        """Let ONNX Runtime capture the decoder's graph; why it cannot. It runs the graph more than once to do so, in
        place: the calls bring no token, which leaves every lane as it is."""
        write(decoder.arrays["query_length"], 0)
        try:
            self._sessions.run(self._sessions.decoder, decoder.binding, decoder.graph)
        except Exception as error:
            return first_line(error)
        return ""

    def _bind_decoder(self, lanes: slice, tokens: int) -> _Decoder:
        sessions, zeros = self._sessions, self._sessions.zeros
        count = lanes.stop - lanes.start
        arrays: dict[str, Array] = {
            "input_ids": zeros((count, tokens), np.dtype(np.int64)),
            "query_length": zeros((count, 1), np.dtype(np.int64)),
            "logits": self._logits(count, tokens),
        }
        binding = sessions.decoder.io_binding()
        bind(binding, "input_ids", None, arrays["input_ids"])
        bind(binding, "query_length", None, arrays["query_length"])
        bind(binding, None, "logits", arrays["logits"])
        bind(binding, "past_length", "present_length", self.past_length, lanes)
        for name, present in self._names:
            bind(binding, name, present, self.state[name], lanes)
        stays = tokens == 1 and lanes.start == 0
        graph = (sessions.new_graph() if stays else NO_GRAPH) if sessions.graphs else None
        return _Decoder(lanes, tokens, binding, arrays, graph)

    def _logits(self, count: int, tokens: int) -> Array:
        """[count, 1 or tokens, vocabulary], which the next call may overwrite."""
        sessions, single = self._sessions, np.dtype(np.float32)
        if tokens > 1:
            rows = tokens if sessions.all_logits else 1
            wide: Array = sessions.zeros((count, rows, sessions.vocabulary), single)
            return wide
        if self._step_logits is None:
            self._step_logits = sessions.zeros((self.lanes, 1, sessions.vocabulary), single)
        return self._part(self._step_logits, 0, count)


class Sessions:
    """The sessions of one artifact; they hold the weights once, however many states use them.

    operators: the library to register for each operator, None where its function runs. top_logits: the graph that finds
    the largest logits, and how many; not used on the CPU. float_input: see `LoadOptions`. graphs: whether decode steps
    are CUDA graphs, and graph_problem why they are not though it was asked. Raises EnvironmentProblem where ONNX
    Runtime cannot use the device.
    """

    def __init__(
        self,
        decoder: Path,
        merge: Path | None,
        *,
        threads: int,
        vocabulary: int,
        all_logits: bool,
        operators: Mapping[str, Path | None],
        top_logits: tuple[Path, int] | None = None,
        device: str = "cpu",
        graphs: bool = False,
        float_input: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self.all_logits = all_logits
        self.device = device
        self.zeros: Any = np.zeros if device == "cpu" else partial(DeviceArray, device)
        self.graphs, self.graph_problem = graphs, ""
        self._new_graphs = itertools.count(1)
        self._top_logits: Path | None = None
        self.top_count = 0
        if top_logits is not None:
            self._top_logits, self.top_count = top_logits
        attention, merging = operators["VoteAttention"], operators["MergeCache"]
        self._new_decoder = partial(
            open_session, decoder, threads=threads, operators=attention, device=device, float_input=float_input
        )
        self.decoder: Any = None
        if graphs:
            try:
                self.decoder = self._new_decoder(graphs=True)
            except EnvironmentProblem as error:
                self.graphs, self.graph_problem = False, error.problem
        if self.decoder is None:
            self.decoder = self._new_decoder(graphs=False)
        # A function is one long chain of small nodes, which is fastest on one thread.
        self.merge = (
            open_session(merge, threads=threads if merging else 1, operators=merging, device=device) if merge else None
        )

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> OnnxRuntimeState:
        """State for `lanes` sequences, all empty. memory: see `kvexport.backends.base.Sessions`."""
        return OnnxRuntimeState(self, plan, lanes, memory)

    @cached_property
    def finder(self) -> Any:
        """The session of the graph that finds the largest logits."""
        assert self._top_logits is not None
        return open_session(self._top_logits, threads=1, operators=None, device=self.device)

    def run(self, session: Any, binding: Any, graph: int | None) -> None:
        """One run; with `graph` as the replay of that CUDA graph, or as its capture where it is new. None: there are no
        graphs."""
        if graph is None:
            session.run_with_iobinding(binding)
        else:
            from onnxruntime import RunOptions

            options = RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph))
            session.run_with_iobinding(binding, options)
        if self.zeros is not np.zeros:
            binding.synchronize_outputs()

    def open_decoder(self, model: bytes) -> Any:
        """A session of another decoder over the same weights."""
        return self._new_decoder(graphs=False, model=model)

    def new_graph(self) -> int:
        """An id that no graph has had."""
        return next(self._new_graphs)

    def without_graphs(self, why: str) -> None:
        """A new decoder without CUDA graphs, in the place of one that cannot capture them."""
        self.graphs, self.graph_problem = False, why
        self.decoder = None
        self.decoder = self._new_decoder(graphs=False)
