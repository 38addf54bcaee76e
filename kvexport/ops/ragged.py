"""VoteAttention and MergeCache over caches of single KV heads, which may differ in capacity and budget.

RaggedVoteAttention and RaggedMergeCache loop over the KV heads of a layer. For each KV head, with the query heads of
its group, they call VoteAttention or MergeCache over its own cache. Their ONNX functions do the same: they consist of
VoteAttention or MergeCache nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor

from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.onnx_function import DOMAIN, VERSION, merge_cache_node_attributes, overload_of
from kvexport.ops.to_onnx import OPSET
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION, Operator, ragged
from kvexport.schema.state import STATE, StateTensor

HEADS = {"query": 1, "key": 1, "value": 1, "sink_logits": 0}  # the dimension that counts heads


def heads_of(
    query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None, caches: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield the query, key, value and sink logits of each KV head of a layer with `caches` KV heads."""
    queries, keys, values = (x.chunk(caches, HEADS["query"]) for x in (query, key, value))
    sinks: Sequence[Tensor | None] = [None] * caches
    if sink_logits is not None:
        sinks = sink_logits.chunk(caches, HEADS["sink_logits"])
    yield from zip(queries, keys, values, sinks, strict=True)


def ragged_vote_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    query_length: Tensor,
    sink_logits: Tensor | None,
    *past: Tensor,
    attributes: VoteAttentionAttributes,
) -> tuple[Tensor, ...]:
    """Return one layer's attention output, and its caches after the new tokens are appended.

    Args:
        query: [B, Hq, T, D], as in `vote_attention`.
        key: [B, H, T, D].
        value: [B, H, T, Dv].
        position: [B, T] int64.
        query_length: [B, 1] int64.
        sink_logits: [Hq], or None.
        past: The state tensors of the cache of each KV head, cache by cache. Each has H = 1.
        attributes: The attributes of the node.

    Returns:
        The output [B, Hq, T, Dv], and the present state tensors in the order of `past`.
    """
    caches = _caches(past, key.shape[1])
    outputs, presents = [], []
    for (q, k, v, sinks), own in zip(heads_of(query, key, value, sink_logits, len(caches)), caches, strict=True):
        state, extra = own[: len(STATE)], own[len(STATE) :]
        inputs = (q, k, v, position, query_length, *state, sinks, *extra)
        output, *present = vote_attention(*inputs, attributes=attributes)  # type: ignore[arg-type]
        outputs.append(output)
        presents += present
    return (torch.cat(outputs, 1), *presents)


def ragged_merge_cache(*past: Tensor, attributes: Sequence[MergeCacheAttributes]) -> tuple[Tensor, ...]:
    """Return the caches of KV heads with at most as many occupied slots as the budget of each.

    Args:
        past: The state tensors of the cache of each KV head, cache by cache. Each has H = 1.
        attributes: For each KV head, the attributes of its merge.

    Returns:
        The present state tensors in the order of `past`.
    """
    caches = _caches(past, len(attributes))
    return tuple(
        x for own, of_cache in zip(caches, attributes, strict=True) for x in merge_cache(*own, attributes=of_cache)
    )


def _caches(state: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Return the state tensors of each of `count` caches."""
    size = len(state) // count
    return [state[first : first + size] for first in range(0, len(state), size)]


def ragged_node_attributes(attributes: Sequence[MergeCacheAttributes]) -> dict[str, Any]:
    """Return the attributes of a RaggedMergeCache node by their names in the contract.

    Args:
        attributes: For each KV head, the attributes of its merge. They differ only in budget and recent.
    """
    own = {"budget": [x.budget for x in attributes], "recent": [x.recent for x in attributes]}
    operator = ragged(MERGE_CACHE, len(attributes))
    return operator.node_attributes({**merge_cache_node_attributes(attributes[0]), **own})


def callee(function: onnx.FunctionProto, callees: dict[str, onnx.FunctionProto]) -> onnx.FunctionProto:
    """Return a copy of a function of VoteAttention or MergeCache that the nodes of another function can call.

    ONNX Runtime ignores the overload of a node in a function, so the copy has none. The first function of an operator
    keeps the operator's name, for which libraries have kernels. Every further one gets another name.

    Args:
        function: The function.
        callees: The copies for one ONNX model by the overload of their functions. The new copy is added.
    """
    if function.overload not in callees:
        copy = onnx.FunctionProto()
        copy.CopyFrom(function)
        if any(other.name == function.name for other in callees.values()):
            copy.name = f"{function.name}_{function.overload}"
        copy.overload = ""
        callees[function.overload] = copy
    return callees[function.overload]


def ragged_vote_attention_function(
    attention: onnx.FunctionProto,
    attributes: Mapping[str, Any],
    *,
    caches: int,
    extra: Sequence[StateTensor] = (),
    sinks: bool = False,
) -> onnx.FunctionProto:
    """Return the ONNX function of RaggedVoteAttention: a VoteAttention node for each KV head.

    Args:
        attention: The function of these nodes, a `callee`.
        attributes: The attributes of these nodes.
        caches: The number of KV heads.
        extra: The state tensors of a cache after the contract's five.
        sinks: Whether the layer has sink logits.
    """
    one = VOTE_ATTENTION.with_state(extra)
    split = [name for name in HEADS if sinks or name != "sink_logits"]
    nodes = [
        helper.make_node("Split", [name], [f"{name}.{i}" for i in range(caches)], axis=HEADS[name], num_outputs=caches)
        for name in split
    ]
    for i in range(caches):
        shared = {name: name for name in ("position", "query_length")} | ({} if sinks else {"sink_logits": ""})
        inputs = [shared.get(name, f"{name}.{i}") for name in one.input_names]
        while not inputs[-1]:
            inputs.pop()
        nodes.append(_node(attention, inputs, [f"{x}.{i}" for x in one.output_names], attributes))
    nodes.append(helper.make_node("Concat", [f"output.{i}" for i in range(caches)], ["output"], axis=1))
    return _function(ragged(VOTE_ATTENTION, caches, extra), attention, nodes, {"sinks": sinks, **attributes})


def ragged_merge_cache_function(
    merge: onnx.FunctionProto, attributes: Sequence[Mapping[str, Any]], extra: Sequence[StateTensor] = ()
) -> onnx.FunctionProto:
    """Return the ONNX function of RaggedMergeCache: a MergeCache node for each KV head.

    Args:
        merge: The function of these nodes, a `callee`.
        attributes: For each KV head, the attributes of its node.
        extra: The state tensors of a cache after the contract's five.
    """
    one = MERGE_CACHE.with_state(extra)
    nodes = [
        _node(merge, [f"{x}.{i}" for x in one.input_names], [f"{x}.{i}" for x in one.output_names], own)
        for i, own in enumerate(attributes)
    ]
    return _function(ragged(MERGE_CACHE, len(attributes), extra), merge, nodes, {"nodes": attributes})


def _node(
    function: onnx.FunctionProto, inputs: list[str], outputs: list[str], attributes: Mapping[str, Any]
) -> onnx.NodeProto:
    return helper.make_node(function.name, inputs, outputs, domain=DOMAIN, **attributes)


def _function(
    operator: Operator, of_nodes: onnx.FunctionProto, nodes: list[onnx.NodeProto], meaning: dict[str, Any]
) -> onnx.FunctionProto:
    """Return the ONNX function of a ragged operator, whose body is `nodes`: calls of the ONNX function `of_nodes`."""
    return helper.make_function(
        DOMAIN,
        operator.name,
        operator.input_names,
        operator.output_names,
        nodes,
        [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        overload=overload_of({"op": operator.name, "of": of_nodes.name, "inputs": operator.input_names, **meaning}),
    )
