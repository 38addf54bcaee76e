"""The two graphs on ONNX Runtime's CPU provider, with the state bound in place: input and output are one buffer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan
from kvexport.native import library, why_function


class OnnxRuntimeBackend:
    """State arrays of a fixed number of lanes and the sessions that advance them (see `kvexport.runtime.lanes.Backend`)."""

    def __init__(self, sessions: Sessions, plan: CachePlan, lanes: int) -> None:
        self.lanes = lanes
        self._sessions = sessions
        self.state = {name: np.zeros(layer.shapes(lanes)[kind], layer.dtypes()[kind]) for name, _, layer, kind in plan.state_names()}
        self._names = [(name, present) for name, present, *_ in plan.state_names()]
        self.past_length = np.zeros((lanes, 1), dtype=np.int64)
        # Two decoder bindings stay: of one token, and of the last other width. Merge bindings stay per run of lanes.
        self._decoders: dict[bool, tuple[int, Any, dict[str, NDArray[Any]]]] = {}
        self._mergers: dict[tuple[int, int], Any] = {}

    def reset(self) -> None:
        """Empty every lane: an all-zero state is an empty cache."""
        for array in [*self.state.values(), self.past_length]:
            array[...] = 0

    def decode(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Backend.decode`."""
        tokens = input_ids.shape[1]
        known = self._decoders.get(tokens == 1)
        if known is None or known[0] != tokens:
            known = self._decoders[tokens == 1] = (tokens, *self._bind_decoder(tokens))
        _, binding, arrays = known
        arrays["input_ids"][...] = input_ids
        arrays["query_length"][...] = query_length
        self._sessions.decoder.run_with_iobinding(binding)
        logits: NDArray[np.float32] = arrays["logits"]
        return logits

    def merge(self, first: int, last: int) -> None:
        """See `Backend.merge`."""
        session = self._sessions.merge
        assert session is not None
        if (first, last) not in self._mergers:
            binding = session.io_binding()
            wanted = {i.name for i in session.get_inputs()}
            for name, present in self._names:
                if name in wanted:
                    _bind(binding, name, present, self.state[name][first:last])
            self._mergers[(first, last)] = binding
        session.run_with_iobinding(self._mergers[(first, last)])

    def _bind_decoder(self, tokens: int) -> tuple[Any, dict[str, NDArray[Any]]]:
        session = self._sessions.decoder
        rows = tokens if self._sessions.all_logits else 1
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros((self.lanes, tokens), dtype=np.int64),
            "query_length": np.zeros((self.lanes, 1), dtype=np.int64),
            "logits": np.zeros((self.lanes, rows, self._sessions.vocabulary), dtype=np.float32),
        }
        binding = session.io_binding()
        _bind(binding, "input_ids", None, arrays["input_ids"])
        _bind(binding, "query_length", None, arrays["query_length"])
        _bind(binding, None, "logits", arrays["logits"])
        _bind(binding, "past_length", "present_length", self.past_length)
        for name, present in self._names:
            _bind(binding, name, present, self.state[name])
        return binding, arrays


class Sessions:
    """The sessions of one artifact; they hold the weights once, however many backends use them."""

    def __init__(
        self, decoder: Path, merge: Path | None, *, threads: int, vocabulary: int, all_logits: bool, method: Mapping[str, Any]
    ) -> None:
        operators = library()
        native = why_function(operators, "MergeCache", method) is None
        self.decoder = _session(decoder, threads, operators)
        # A function is one long chain of small nodes, which is fastest on one thread.
        self.merge = _session(merge, threads if native else 1, operators if native else None) if merge else None
        self.vocabulary = vocabulary
        self.all_logits = all_logits


def _session(path: Path, threads: int, operators: Path | None) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Threads that spin on after a run would be in the way of the other session's.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if operators is not None:
        options.register_custom_ops_library(str(operators))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _bind(binding: Any, name: str | None, present: str | None, array: NDArray[Any]) -> None:
    """`array` as the input `name` and the output `present`; both make it in place."""
    where = ("cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    if name is not None:
        binding.bind_input(name, *where)
    if present is not None:
        binding.bind_output(present, *where)
