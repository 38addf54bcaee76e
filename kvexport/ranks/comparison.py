"""What `kvexport validate` compares of an artifact of several ranks: the ONNX graphs of all ranks, past and present in
buffers of their own, as one graph over the whole state."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.base import Backend, Runners
from kvexport.ranks.channel import Message
from kvexport.ranks.heads import Arrays, joined, part_of
from kvexport.ranks.model import RankedModel
from kvexport.ranks.processes import Ranks

PAST, PRESENT = "past_key_values.", "present."


def runners(backend: Backend, model: Any, manifest: Manifest, path: Path) -> Runners:
    """`Backend.runners`, of all ranks where there are several. path: of the artifact."""
    if not isinstance(model, RankedModel):
        return backend.runners(model, manifest)
    own = model.ranks.call(partial(OneRank, backend, model.ranks.model, model.ranks.manifest, 0))
    there = own.runners
    return Runners(
        AllRanks(model.ranks, own, "decode"),
        AllRanks(model.ranks, own, "prefill"),
        AllRanks(model.ranks, own, "merge") if there.merge else None,
        partial(_open, model.ranks, own, path, manifest) if there.open_decoder else None,
    )


class OneRank:
    """The graphs of one rank, in its process."""

    def __init__(self, backend: Backend, model: Any, manifest: Manifest, rank: int) -> None:
        self.rank, self.ranks = rank, manifest.graphs.rank_count
        self.runners = backend.runners(model, manifest)
        self.cut: Any = None  # a session of another decoder

    def infer(self, graph: str, feed: Arrays) -> dict[str, NDArray[Any]]:
        """Outputs of a whole feed, of the state this rank's heads. graph: a field of `Runners`, or "cut"."""
        state = {name: x for name, x in feed.items() if name.startswith(PAST)}
        given = OrderedDict({**feed, **part_of(state, self.rank, self.ranks, 1)})
        given = OrderedDict((name, np.ascontiguousarray(x)) for name, x in given.items())
        if graph == "cut":
            names = [output.name for output in self.cut.get_outputs()]
            return dict(zip(names, self.cut.run(names, given), strict=True))
        with getattr(self.runners, graph) as runner:
            return dict(runner.infer(given))

    def open(self, model: bytes) -> None:
        """Open another decoder over the same weights."""
        assert self.runners.open_decoder is not None
        self.cut = self.runners.open_decoder(model)


class AllRanks:
    """A runner, or a session, of all ranks."""

    def __init__(self, ranks: Ranks, own: OneRank, graph: str) -> None:
        self._ranks, self._own, self._graph = ranks, own, graph

    def __enter__(self) -> AllRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def infer(self, feed: Arrays) -> dict[str, NDArray[Any]]:
        """Outputs over the whole state; those that are no state are rank 0's."""
        message = Message("infer", {"graph": self._graph, "dropped": []}, feed)
        parts: list[Mapping[str, NDArray[Any]]] = self._ranks.ask(partial(self._own.infer, self._graph, feed), message)
        return {
            name: joined([part[name] for part in parts], 1) if name.startswith(PRESENT) else x
            for name, x in parts[0].items()
        }

    def get_outputs(self) -> Any:
        """Of a session."""
        return self._own.cut.get_outputs()

    def run(self, names: Sequence[str], feed: Arrays) -> list[NDArray[Any]]:
        """Of a session."""
        outputs = self.infer(feed)
        return [outputs[name] for name in names]


def _open(ranks: Ranks, own: OneRank, path: Path, manifest: Manifest, model: bytes) -> AllRanks:
    """A decoder made of rank 0's, on every rank over its own weights."""
    files = (manifest.graphs.decoder, *manifest.graphs.ranks)
    models = {str(rank): np.frombuffer(_over(model, path / file), np.uint8) for rank, file in enumerate(files) if rank}
    ranks.call(partial(own.open, model), Message("open", {"dropped": []}, models))
    return AllRanks(ranks, own, "cut")


def _over(model: bytes, decoder: Path) -> bytes:
    """The ONNX graph with the weights of another decoder, by their names."""
    import onnx

    changed = onnx.load_model(io.BytesIO(model), load_external_data=False)
    there = {x.name: x for x in onnx.load_model(decoder, load_external_data=False).graph.initializer}
    for tensor in changed.graph.initializer:
        if tensor.external_data:
            tensor.CopyFrom(there[tensor.name])
    done: bytes = changed.SerializeToString()
    return done
