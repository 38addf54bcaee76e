"""The ONNX graphs of all ranks as one graph over the whole state, for `kvexport validate`.

Past and present state tensors have separate buffers.
"""

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
from kvexport.ranks.heads import Arrays, joined, rank_heads
from kvexport.ranks.model import RankedModel
from kvexport.ranks.processes import Ranks

PAST, PRESENT = "past_key_values.", "present."


def runners(backend: Backend, model: Any, manifest: Manifest, path: Path) -> Runners:
    """Return `Backend.runners` over all ranks of a model.

    Args:
        backend: The backend.
        model: The loaded model; one of a single process gives the backend's own runners.
        manifest: The manifest of the artifact.
        path: The directory of the artifact.
    """
    if not isinstance(model, RankedModel):
        return backend.runners(model, manifest)
    first = model.ranks.call(partial(OneRank, backend, model.ranks.model, model.ranks.manifest, 0))
    one = first.runners
    return Runners(
        AllRanks(model.ranks, first, "decode"),
        AllRanks(model.ranks, first, "prefill"),
        AllRanks(model.ranks, first, "merge") if one.merge else None,
        partial(_open, model.ranks, first, path, manifest) if one.open_decoder else None,
    )


class OneRank:
    """The graphs of one rank, in its process."""

    def __init__(self, backend: Backend, model: Any, manifest: Manifest, rank: int) -> None:
        self.rank, self.ranks = rank, manifest.graphs.rank_count
        self.runners = backend.runners(model, manifest)
        self.session: Any = None  # a session of another decoder

    def infer(self, graph: str, feed: Arrays) -> dict[str, NDArray[Any]]:
        """Return the outputs of one rank's graph; state tensors have this rank's heads.

        Args:
            graph: A field of `Runners`, or "cut" for the decoder of `open`.
            feed: The inputs over all heads.
        """
        state = {name: x for name, x in feed.items() if name.startswith(PAST)}
        inputs = OrderedDict({**feed, **rank_heads(state, self.rank, self.ranks, 1)})
        inputs = OrderedDict((name, np.ascontiguousarray(x)) for name, x in inputs.items())
        if graph == "cut":
            names = [output.name for output in self.session.get_outputs()]
            return dict(zip(names, self.session.run(names, inputs), strict=True))
        with getattr(self.runners, graph) as runner:
            return dict(runner.infer(inputs))

    def open(self, model: bytes) -> None:
        """Open another decoder over the same weights.

        Args:
            model: The bytes of its ONNX graph.
        """
        assert self.runners.open_decoder is not None
        self.session = self.runners.open_decoder(model)


class AllRanks:
    """A graph that runs on all ranks, with the interface of a polygraphy runner or of an ONNX Runtime session."""

    def __init__(self, ranks: Ranks, first: OneRank, graph: str) -> None:
        self._ranks, self._first, self._graph = ranks, first, graph

    def __enter__(self) -> AllRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def infer(self, feed: Arrays) -> dict[str, NDArray[Any]]:
        """Return the outputs over the whole state; outputs that are not state are those of rank 0."""
        message = Message("infer", {"graph": self._graph, "dropped": []}, feed)
        outputs: list[Mapping[str, NDArray[Any]]] = self._ranks.ask(
            partial(self._first.infer, self._graph, feed), message
        )
        return {
            name: joined([output[name] for output in outputs], 1) if name.startswith(PRESENT) else x
            for name, x in outputs[0].items()
        }

    def get_outputs(self) -> Any:
        """Return the outputs of the session, in ONNX Runtime's form."""
        return self._first.session.get_outputs()

    def run(self, names: Sequence[str], feed: Arrays) -> list[NDArray[Any]]:
        """Run the session and return the outputs `names`."""
        outputs = self.infer(feed)
        return [outputs[name] for name in names]


def _open(ranks: Ranks, first: OneRank, path: Path, manifest: Manifest, model: bytes) -> AllRanks:
    """Open on every rank a decoder that was derived from rank 0's, each over its own weights."""
    files = (manifest.graphs.decoder, *manifest.graphs.ranks)
    models = {str(rank): np.frombuffer(_over(model, path / file), np.uint8) for rank, file in enumerate(files) if rank}
    ranks.call(partial(first.open, model), Message("open", {"dropped": []}, models))
    return AllRanks(ranks, first, "cut")


def _over(model: bytes, decoder: Path) -> bytes:
    """Return the ONNX graph with the weights of another decoder, matched by name."""
    import onnx

    changed = onnx.load_model(io.BytesIO(model), load_external_data=False)
    initializers = {x.name: x for x in onnx.load_model(decoder, load_external_data=False).graph.initializer}
    for tensor in changed.graph.initializer:
        if tensor.external_data:
            tensor.CopyFrom(initializers[tensor.name])
    result: bytes = changed.SerializeToString()
    return result
