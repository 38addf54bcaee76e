"""RaggedVoteAttention and RaggedMergeCache over numpy arrays, in each way that this machine can run them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvexport.methods.base import Method
from kvexport.ops import ragged
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import (
    merge_cache_function,
    merge_cache_node_attributes,
    vote_attention_function,
    vote_attention_node_attributes,
)
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.schema import operators
from kvexport.schema.state import StateTensor, scales_of
from tests.conformance.backends import SYMBOLIC, node_session, reached
from tests.conformance.cuda_library import CudaOnHost, cache_type_of

Arrays = dict[str, np.ndarray]
BACKENDS: dict[str, Any] = {backend.name: backend for backend in reached()}
WAYS = list(BACKENDS)
CALLERS = [name for name, backend in BACKENDS.items() if isinstance(backend, CudaOnHost)]  # without a node


def join(heads: Sequence[Arrays], prefix: str = "") -> Arrays:
    """Return the inputs of a ragged node from those of one node for each KV head.

    The state tensors, whose names begin with `prefix` if it is not empty, get the number of the cache.
    """
    result: Arrays = {}
    for h, inputs in enumerate(heads):
        for name, x in inputs.items():
            if not prefix or name.startswith(prefix):
                result[f"{name}.{h}"] = x
    for name in [name for name in heads[0] if prefix and not name.startswith(prefix)]:
        axis = {"query": 1, "key": 1, "value": 1, "sink_logits": 0}.get(name)
        parts = [inputs[name] for inputs in heads]
        result[name] = parts[0] if axis is None else np.concatenate(parts, axis)
    return result


def vote_attention(way: str, heads: Sequence[Arrays], attributes: VoteAttentionAttributes) -> list[Arrays]:
    """Return the outputs of each KV head, by name, from one ragged node over the inputs of each KV head."""
    if way in CALLERS:
        return BACKENDS[way].caller.ragged_vote_attention(heads, attributes)
    key, value, query = heads[0]["past_key"], heads[0]["past_value"], heads[0]["query"]
    cache_type = cache_type_of(key, value)
    extra = _extra(cache_type, attributes.method)
    operator = operators.ragged(operators.VOTE_ATTENTION, len(heads), extra)
    inputs, sinks = join(heads, "past_"), "sink_logits" in heads[0]
    if way == "torch":
        tensors = [torch.from_numpy(inputs[name]) if name in inputs else None for name in operator.input_names]
        outputs = [x.numpy() for x in ragged.ragged_vote_attention(*tensors, attributes=attributes)]
    else:
        sizes = (heads[0]["key"].shape[3], heads[0]["value"].shape[3])
        types = (query.dtype.name, cache_type)
        session = _attention_session(
            way, attributes, len(heads), (query.shape[1], 1), sizes, types, sinks, _infos(inputs)
        )
        outputs = session.run(operator.output_names, inputs)
    result = dict(zip(operator.output_names, outputs, strict=True))
    parts = np.split(result["output"], len(heads), axis=1)
    return [{"output": part, **_of_cache(result, h)} for h, part in enumerate(parts)]


def merge_cache(way: str, heads: Sequence[Arrays], attributes: Sequence[MergeCacheAttributes]) -> list[Arrays]:
    """Return the present state of each KV head, by name, from one ragged node over the state of each KV head."""
    if way in CALLERS:
        return BACKENDS[way].caller.ragged_merge_cache(heads, attributes)
    key, value, statistics = heads[0]["key"], heads[0]["value"], heads[0]["score"].shape[2]
    cache_type = cache_type_of(key, value)
    extra = _extra(cache_type, attributes[0].method)
    operator = operators.ragged(operators.MERGE_CACHE, len(heads), extra)
    inputs = join(heads)
    if way == "torch":
        tensors = [torch.from_numpy(inputs[name]) for name in operator.input_names]
        outputs = [x.numpy() for x in ragged.ragged_merge_cache(*tensors, attributes=attributes)]
    else:
        packed = 2 if key.dtype == np.uint8 else 1, 2 if value.dtype == np.uint8 else 1
        sizes = (key.shape[3] * packed[0], value.shape[3] * packed[1])
        session = _merge_session(way, tuple(attributes), sizes, statistics, cache_type, _infos(inputs))
        outputs = session.run(operator.output_names, inputs)
    result = dict(zip(operator.output_names, outputs, strict=True))
    return [_of_cache(result, h) for h in range(len(heads))]


def _extra(cache_type: str, method: Method | None) -> tuple[StateTensor, ...]:
    return (*scales_of(cache_type), *(method.extra_state if method else ()))


def _of_cache(result: Arrays, h: int) -> Arrays:
    return {name.rpartition(".")[0]: x for name, x in result.items() if name.endswith(f".{h}")}


Infos = tuple[tuple[str, str, tuple[int | None, ...]], ...]


def _infos(inputs: Arrays) -> Infos:
    """Return name, type and shape of each tensor; batch, tokens and capacities are free."""
    infos = []
    for name, x in inputs.items():
        base, _, number = name.partition(".")
        tensor = base.removeprefix("past_")
        axes = SYMBOLIC.get(f"past_{tensor}" if number else name, {0: "B"})
        shape = tuple(None if i in axes else size for i, size in enumerate(x.shape))
        infos.append((name, x.dtype.name, shape))
        if number:
            infos.append((f"present_{tensor}.{number}", x.dtype.name, shape))
        if name == "query":
            infos.append(("output", x.dtype.name, (None, x.shape[1], None, None)))
    return tuple(infos)


def _node_infos(infos: Infos) -> dict[str, Any]:
    return {name: (np.dtype(dtype), list(shape)) for name, dtype, shape in infos}


@cache
def _attention_session(
    way: str,
    attributes: VoteAttentionAttributes,
    caches: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    types: tuple[str, str],
    sinks: bool,
    infos: Infos,
) -> Any:
    dtype, cache_type = types
    extra = _extra(cache_type, attributes.method)
    operator, node = (
        operators.ragged(operators.VOTE_ATTENTION, caches, extra),
        vote_attention_node_attributes(attributes),
    )
    meaning: Any = None
    if way != "onnx-function":
        meaning = BACKENDS[way].path()
    else:
        one = vote_attention_function(
            attributes,
            heads=heads,
            head_sizes=sizes,
            dtype=getattr(torch, dtype),
            cache_type="" if cache_type == dtype else cache_type,
            sinks=sinks,
        )
        one = ragged.callee(one, {})
        meaning = [ragged.ragged_vote_attention_function(one, node, caches=caches, extra=extra, sinks=sinks), one]
    inputs = [name if sinks or name != "sink_logits" else "" for name in operator.input_names]
    return node_session(operator.name, meaning, node, inputs, operator.output_names, _node_infos(infos))


@cache
def _merge_session(
    way: str,
    attributes: tuple[MergeCacheAttributes, ...],
    sizes: tuple[int, int],
    statistics: int,
    cache_type: str,
    infos: Infos,
) -> Any:
    extra = _extra(cache_type, attributes[0].method)
    operator = operators.ragged(operators.MERGE_CACHE, len(attributes), extra)
    meaning: Any = None
    if way != "onnx-function":
        meaning = BACKENDS[way].path()
    else:
        one = merge_cache_function(
            attributes[0], kv_heads=1, head_sizes=sizes, statistics=statistics, cache_type=cache_type
        )
        one, nodes = ragged.callee(one, {}), [merge_cache_node_attributes(x) for x in attributes]
        meaning = [ragged.ragged_merge_cache_function(one, nodes, extra), one]
    node = ragged.ragged_node_attributes(attributes)
    return node_session(operator.name, meaning, node, operator.input_names, operator.output_names, _node_infos(infos))
