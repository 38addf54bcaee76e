"""The decoder and merge graphs combined into one ONNX graph, for servers that run one graph per call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvexport.artifact.manifest import Limits
from kvexport.cache import CachePlan

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray


def with_merge(decoder: onnx.ModelProto, merge: onnx.ModelProto | None, plan: CachePlan) -> onnx.ModelProto:
    """Append the merge graph to the decoder graph, so that every call ends with a merge of the KV caches.

    A call equals a step of an engine with `merge_every` 1: MergeCache does not change a cache within its budget.

    Args:
        decoder: The decoder, which is changed. Its weights stay in their files.
        merge: The graph of MergeCache nodes; None if no layer can exceed its budget.
        plan: The cache plan.

    Returns:
        `decoder`.
    """
    if merge is None:
        return decoder
    merged = {value.name for value in merge.graph.output}
    before = {name: f"{name}.before_merge" for name in merged}
    for node in decoder.graph.node:
        node.input[:] = [before.get(name, name) for name in node.input]
        node.output[:] = [before.get(name, name) for name in node.output]
    appended = {past: before[present] for past, present, _, _ in plan.state_names() if present in merged}
    for node in merge.graph.node:  # nothing but MergeCache nodes: no names of their own beside those of the state
        node.input[:] = [appended[name] for name in node.input]
        decoder.graph.node.append(node)
    known = {(function.domain, function.name, function.overload) for function in decoder.functions}
    decoder.functions.extend(f for f in merge.functions if (f.domain, f.name, f.overload) not in known)
    return decoder


def with_limits(decoder: onnx.ModelProto, limits: Limits) -> onnx.ModelProto:
    """Add checks of the chunk size and the sequence length, which the engine otherwise makes, to the decoder graph.

    A call with more than `prefill_chunk` tokens fails. A sequence longer than `max_length` gets NaN logits; other
    sequences of the call are not affected.

    Returns:
        `decoder`, which is changed.
    """
    import numpy as np
    from onnx import helper, numpy_helper

    within, anywhere = "query_length.within_chunk", "logits.of_any_length"
    for node in decoder.graph.node:
        node.input[:] = [within if name == "query_length" else name for name in node.input]
        node.output[:] = [anywhere if name == "logits" else name for name in node.output]
    constants: dict[str, NDArray[Any]] = {
        "chunk.counts": np.arange(1, limits.prefill_chunk + 1, dtype=np.int64),
        "chunk.start": np.array([0], np.int64),
        "chunk.axes": np.array([2], np.int64),
        "length.limit": np.array(limits.max_length, np.int64),
        "length.nan": np.array(np.nan, np.float32),
    }
    first = [
        helper.make_node("Shape", ["input_ids"], ["chunk.width"], start=1, end=2),
        helper.make_node("Slice", ["chunk.counts", "chunk.start", "chunk.width"], ["chunk.there"]),
        # Every provider checks a reshape, and none leaves one out whose result is used
        helper.make_node("Reshape", ["chunk.there", "chunk.width"], ["chunk.all"]),
        helper.make_node("ReduceMax", ["chunk.all"], ["chunk.most"]),
        helper.make_node("Min", ["query_length", "chunk.most"], [within]),
    ]
    last = [
        helper.make_node("Greater", ["present_length", "length.limit"], ["length.beyond"]),
        helper.make_node("Unsqueeze", ["length.beyond", "chunk.axes"], ["length.rows"]),
        helper.make_node("Where", ["length.rows", "length.nan", anywhere], ["logits"]),
    ]
    nodes = [*first, *decoder.graph.node, *last]
    del decoder.graph.node[:]
    decoder.graph.node.extend(nodes)
    decoder.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return decoder
