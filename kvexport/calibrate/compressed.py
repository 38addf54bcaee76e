"""The attention of one layer over a text with a compressed KV cache, by the native operators where they are built."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvexport.cache import LayerCache, LayerGeometry
from kvexport.export.graph.graphs import merge_attributes
from kvexport.export.graph.tracer import layer_attributes
from kvexport.methods.base import Method
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention

if TYPE_CHECKING:
    from torch import Tensor

OPSETS = (("", 23), ("kvexport", 1))


def compressed_attention(
    cache: LayerCache, layer: LayerGeometry, method: Method, inputs: Sequence[Tensor], chunk: int
) -> Tensor:
    """Return the attention output [1, Hq, T, Dv] of a layer whose cache merges after every chunk.

    Args:
        cache: The layer's cache.
        layer: The layer's attention geometry.
        method: The compression method.
        inputs: Query [1, Hq, T, D], key [1, H, T, D] and value [1, H, T, Dv], float32.
        chunk: Tokens between merges.
    """
    import torch

    parts, dtypes = [], cache.dtypes()
    state: Sequence[Tensor] = [torch.from_numpy(np.zeros(x, dtypes[name])) for name, x in cache.shapes(1).items()]
    attend, merge = layer_attributes(method, layer), merge_attributes(cache, method)
    native = _is_native(cache, method)
    for first in range(0, inputs[0].shape[2], chunk):
        new = [x[:, :, first : first + chunk].contiguous() for x in inputs]
        tokens = new[0].shape[2]
        position = torch.arange(first, first + tokens)[None]
        arguments: Any = (*new, position, torch.tensor([[tokens]]), *state)
        if native:
            output, *state = _run(_attention_session(attend), arguments)
        else:
            arguments = (*arguments[:10], None, *arguments[10:])
            output, *state = vote_attention(*arguments, attributes=attend)
        parts.append(output)
        if int((state[2] > 0).sum(-1).max()) > cache.budget:
            state = _run(_merge_session(merge), state) if native else merge_cache(*state, attributes=merge)
    return torch.cat(parts, 2)


def _is_native(cache: LayerCache, method: Method) -> bool:
    """Return whether the native operators compute this layer. They take plain float32 caches here."""
    from kvexport.backends.onnxruntime.operators import library, why_function

    path, plain = library(), len(cache.state) == 5 and not cache.sliding_window
    kinds = {str(dtype) for name, dtype in cache.dtypes().items()}
    return (
        plain
        and kinds <= {"float32", "int32"}
        and not any(why_function(path, op, method) for op in ("VoteAttention", "MergeCache"))
    )


def _run(session: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    import torch

    names = [x.name for x in session.get_inputs()]
    inputs = {name: x.numpy() for name, x in zip(names, tensors, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, inputs)]


@lru_cache(maxsize=64)
def _attention_session(attributes: VoteAttentionAttributes) -> Any:
    from kvexport.ops.onnx_function import vote_attention_node_attributes
    from kvexport.schema.operators import VOTE_ATTENTION

    names = VOTE_ATTENTION.input_names[:10], VOTE_ATTENTION.output_names[:6]
    return _session("VoteAttention", vote_attention_node_attributes(attributes), *names)


@lru_cache(maxsize=64)
def _merge_session(attributes: MergeCacheAttributes) -> Any:
    from kvexport.ops.onnx_function import merge_cache_node_attributes
    from kvexport.schema.operators import MERGE_CACHE

    names = MERGE_CACHE.input_names[:5], MERGE_CACHE.output_names[:5]
    return _session("MergeCache", merge_cache_node_attributes(attributes), *names)


def _session(op: str, attributes: dict[str, Any], inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Return a session of one native operator with float32 caches."""
    import onnxruntime
    import torch
    from onnx import TensorProto, helper

    from kvexport.backends.onnxruntime.operators import library

    ranks = {"query": 4, "key": 4, "value": 4, "votes": 3, "score": 4, "query_length": 2, "output": 4}

    def info(name: str) -> Any:
        plain = name.removeprefix("past_").removeprefix("present_")
        kind = {"position": TensorProto.INT32, "query_length": TensorProto.INT64}.get(plain, TensorProto.FLOAT)
        rank = ranks.get(plain, 3)
        if name == "position" and op == "VoteAttention":
            kind, rank = TensorProto.INT64, 2
        return helper.make_tensor_value_info(name, kind, [f"{name}_{i}" for i in range(rank)])

    node = helper.make_node(op, inputs, outputs, domain="kvexport", **attributes)
    graph = helper.make_graph([node], op, [info(name) for name in inputs], [info(name) for name in outputs])
    opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS]
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library()))
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
