"""The ONNX graphs of all tensor-parallel ranks, as one graph over the whole state for `kvexport validate`.

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
    """Return runners of a model's ONNX graphs for validation, which combine the graphs of all tensor-parallel ranks.

    Args:
        backend: The backend.
        model: The loaded model. For a model in a single process, the result is the backend's own runners.
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
    """The ONNX graphs of one tensor-parallel rank, in its process."""

    def __init__(self, backend: Backend, model: Any, manifest: Manifest, rank: int) -> None:
        self.rank, self.ranks = rank, manifest.graphs.rank_count
        self.runners = backend.runners(model, manifest)
        self.session: Any = None  # a session of another decoder

    def infer(self, graph: str, feed: Arrays) -> dict[str, NDArray[Any]]:
        """Run one rank's ONNX graph and return its outputs; state tensors have this rank's KV heads.

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
        """Open another decoder graph over the same weights on this rank.

        Args:
            model: The bytes of its ONNX graph.
        """
        assert self.runners.open_decoder is not None
        self.session = self.runners.open_decoder(model)


class AllRanks:
    """An ONNX graph that runs on all tensor-parallel ranks, with the interface of a polygraphy runner."""

    def __init__(self, ranks: Ranks, first: OneRank, graph: str) -> None:
        self._ranks, self._first, self._graph = ranks, first, graph

    def __enter__(self) -> AllRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def infer(self, feed: Arrays) -> dict[str, NDArray[Any]]:
        """Run the graph on all ranks; return state tensors over all KV heads, and rank 0's other outputs."""
        message = Message("infer", {"graph": self._graph, "dropped": []}, feed)
        outputs: list[Mapping[str, NDArray[Any]]] = self._ranks.ask(
            partial(self._first.infer, self._graph, feed), message
        )
        return {
            name: joined([output[name] for output in outputs], 1) if name.startswith(PRESENT) else x
            for name, x in outputs[0].items()
        }

    def get_outputs(self) -> Any:
        """Return the descriptions of the graph's outputs, in ONNX Runtime's form."""
        return self._first.session.get_outputs()

    def run(self, names: Sequence[str], feed: Arrays) -> list[NDArray[Any]]:
        """Run the graph on all ranks and return the outputs `names`, as an ONNX Runtime session does."""
        outputs = self.infer(feed)
        return [outputs[name] for name in names]


def _open(ranks: Ranks, first: OneRank, path: Path, manifest: Manifest, model: bytes) -> AllRanks:
    """Open an ONNX graph that was cut from rank 0's decoder on every tensor-parallel rank.

    Each rank runs the graph over its own weights, which are matched by name with those of its own decoder file.
    """
    files = (manifest.graphs.decoder, *manifest.graphs.ranks)
    models = {str(rank): np.frombuffer(_over(model, path / file), np.uint8) for rank, file in enumerate(files) if rank}
    ranks.call(partial(first.open, model), Message("open", {"dropped": []}, models))
    return AllRanks(ranks, first, "cut")


def _over(model: bytes, decoder: Path) -> bytes:
    """Return an ONNX graph that reads its weights from another decoder's file, matched by name."""
    import onnx

    changed = onnx.load_model(io.BytesIO(model), load_external_data=False)
    initializers = {x.name: x for x in onnx.load_model(decoder, load_external_data=False).graph.initializer}
    for tensor in changed.graph.initializer:
        if tensor.external_data:
            tensor.CopyFrom(initializers[tensor.name])
    result: bytes = changed.SerializeToString()
    return result
