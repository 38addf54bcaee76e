"""The program that every tensor-parallel rank except rank 0 runs.

Its process has a share of the model and of the cache, executes the calls of rank 0 in order, and ends when rank 0 does.
`kvexport.ranks.processes` starts it with the numbers of two open files and the module search path:

    python -c PROGRAM SOCKET MEMORY PATH
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from functools import cached_property
from mmap import mmap
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kvexport import backends
from kvexport.artifact.manifest import Manifest
from kvexport.artifact.reading import load_manifest
from kvexport.backends.base import Backend, LoadOptions
from kvexport.backends.model_state import LoadedModel, ModelState
from kvexport.errors import KvexportError
from kvexport.ranks.channel import Channel, Message
from kvexport.ranks.comparison import OneRank
from kvexport.ranks.heads import rank_heads
from kvexport.ranks.processes import SumError, require_sums


def main() -> None:
    """Run this process as a tensor-parallel rank, until rank 0 closes the connection."""
    end, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    channel = Channel(end, on_end=lambda _: os._exit(0))  # ends the process even if it waits for a sum
    start = channel.receive()
    assert start is not None
    try:
        _work(channel, start.values, memory)
    except Exception as error:
        message_text = str(error) if isinstance(error, SumError) else f"{type(error).__name__}: {error}"
        failure = error if isinstance(error, KvexportError) else KvexportError(message_text)
        channel.send(Message("failed", {"problem": failure.problem, "fix": failure.fix}))
        sys.exit(1)


def _work(channel: Channel, start: Mapping[str, Any], file: int) -> None:
    path, rank = Path(start["path"]), int(start["rank"])
    manifest = load_manifest(path, verify=False).rank_manifest(rank)  # rank 0 has verified the files
    backend, options = backends.get(start["backend"]), LoadOptions(**start["options"])
    collectives, memory = backend.collectives(manifest, options), mmap(file, 0)

    collectives.join(memory, rank, manifest.graphs.rank_count)
    model = backend.load(path, manifest, options)
    calls = Calls(backend, model, manifest, rank)
    channel.send(Message("ready"))
    while (message := channel.receive()) is not None:
        answer = calls(message)
        require_sums(collectives, memory)
        if answer is not None:
            channel.send(Message("answer", {}, answer))


class Calls:
    """Execution of rank 0's calls on another rank, over the rank's share of the model and the KV caches."""

    def __init__(self, backend: Backend, model: LoadedModel, manifest: Manifest, rank: int) -> None:
        self._backend, self._model, self._manifest = backend, model, manifest
        self._rank, self._ranks = rank, manifest.graphs.rank_count
        self._states: dict[int, ModelState] = {}

    @cached_property
    def _compared(self) -> OneRank:
        return OneRank(self._backend, self._model, self._manifest, self._rank)

    def __call__(self, message: Message) -> dict[str, NDArray[Any]] | None:
        """Execute the call in a message of rank 0, and return its answer; None if the call has no answer."""
        values, arrays = message.values, message.arrays
        for number in values["dropped"]:
            del self._states[number]
        if message.name == "infer":
            return self._compared.infer(values["graph"], arrays)
        if message.name == "open":
            self._compared.open(arrays[str(self._rank)].tobytes())
            return None
        if message.name == "new_state":
            self._states[values["state"]] = self._model.new_state(self._manifest.cache, values["lanes"])
            return None
        state = self._states[values["state"]]
        if message.name == "grown":
            self._states[values["new"]] = state.grown(values["lanes"])
        elif message.name == "decode":
            state.decode(arrays["input_ids"], arrays["query_length"], values["first"])
        elif message.name == "write":
            state.write(values["lane"], rank_heads(arrays, self._rank, self._ranks, 0), values["past_length"])
        elif message.name == "set_state":
            whole = {name: x for name, x in arrays.items() if name != "past_length"}
            state.set_state(rank_heads(whole, self._rank, self._ranks, 1), arrays["past_length"])
        elif message.name == "read":
            return state.read(values["lane"], values["names"])
        elif message.name == "get_state":
            return state.get_state()
        elif message.name in ("merge", "clear", "rollback", "copy"):
            getattr(state, message.name)(*values["arguments"], **values.get("keywords", {}))
        else:
            raise ValueError(f"rank 0 sent {message.name!r}")
        return None
