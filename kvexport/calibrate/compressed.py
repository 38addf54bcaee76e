"""The attention of one layer over a text with a compressed KV cache.

On the CPU native operators compute the attention, if they are built; on a GPU PyTorch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvexport import backends
from kvexport.backends.base import NodeOpener
from kvexport.export.graph.graphs import merge_attributes
from kvexport.export.graph.tracer import layer_attributes
from kvexport.methods.base import Method
from kvexport.ops.layer_state import layer_merge_cache, layer_vote_attention
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import merge_cache_node_attributes, vote_attention_node_attributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.plan.cache import LayerCache, LayerGeometry
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION

if TYPE_CHECKING:
    from torch import Tensor

OPSETS = (("", 23), ("kvexport", 1))


def compressed_attention(
    cache: LayerCache,
    layer: LayerGeometry,
    method: Method,
    inputs: Sequence[Tensor],
    chunk: int,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Return a layer's attention output [1, Hq, T, Dv] over a text whose KV cache is compressed after each chunk."""
    import torch

    parts, dtypes = [], cache.dtypes()
    device = inputs[0].device
    state: Sequence[Tensor] = [
        torch.from_numpy(np.zeros(x, dtypes[name])).to(device) for name, x in cache.shapes(1).items()
    ]
    attend, merge = layer_attributes(method, layer, cache.value_prefix), merge_attributes(cache, method)
    opener = native_opener(cache, method) if sink_logits is None and device.type == "cpu" else None
    for first in range(0, inputs[0].shape[2], chunk):
        new = [x[:, :, first : first + chunk].contiguous() for x in inputs]
        tokens = new[0].shape[2]
        position = torch.arange(first, first + tokens, device=device)[None]
        arguments: Any = (*new, position, torch.tensor([[tokens]], device=device), *state)
        if opener is not None:
            output, *state = _run(_session(attend, opener), arguments)
        else:
            arguments = (*arguments[:10], sink_logits, *arguments[10:])
            output, *state = layer_vote_attention(*arguments, attributes=attend)
        parts.append(output)
        if int((state[2].reshape(cache.kv_heads, -1) > 0).sum(-1).max()) > cache.budget[0]:
            if opener is None:
                state = layer_merge_cache(*state, attributes=merge)
            else:
                state = _run(_session(merge, opener), state)
    return torch.cat(parts, 2)


def native_opener(cache: LayerCache, method: Method) -> NodeOpener | None:
    """Return an opener of native operators, which take float32 caches without extra state; None for PyTorch."""
    if len(cache.state) != 5 or not {str(dtype) for dtype in cache.dtypes().values()} <= {"float32", "int32"}:
        return None
    openers = (backend.node_opener(("VoteAttention", "MergeCache"), method) for backend in backends.all_backends())
    return next((opener for opener in openers if opener is not None), None)


def _run(session: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    import torch

    names = [x.name for x in session.get_inputs()]
    inputs = {name: x.numpy() for name, x in zip(names, tensors, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, inputs)]


@lru_cache(maxsize=64)
def _session(attributes: VoteAttentionAttributes | tuple[MergeCacheAttributes, ...], opener: NodeOpener) -> Any:
    import torch
    from onnx import TensorProto, helper

    new: dict[str, int] = {}
    if isinstance(attributes, VoteAttentionAttributes):
        op, named = VOTE_ATTENTION, vote_attention_node_attributes(attributes)
        inputs, outputs = op.input_names[:10], op.output_names[:6]
        new = {"query": 4, "key": 4, "value": 4, "position": 2, "query_length": 2, "output": 4}
    else:
        op, named = MERGE_CACHE, merge_cache_node_attributes(attributes)
        inputs, outputs = op.input_names[:5], op.output_names[:5]

    def info(name: str) -> Any:
        plain = name.removeprefix("past_").removeprefix("present_")
        whole = TensorProto.INT64 if name in new else TensorProto.INT32
        kind = whole if plain in ("position", "query_length") else TensorProto.FLOAT
        rank = new.get(name, 3 if plain in ("key", "value", "score") else 2)
        return helper.make_tensor_value_info(name, kind, [f"{name}_{i}" for i in range(rank)])

    node = helper.make_node(op.name, inputs, outputs, domain="kvexport", **named)
    graph = helper.make_graph([node], op.name, [info(name) for name in inputs], [info(name) for name in outputs])
    opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return opener(model, torch.get_num_threads())
