"""The ONNX functions of VoteAttention and MergeCache, traced from their definitions in PyTorch.

A node of domain `kvexport` has attributes for native kernels. Nodes of an operator that compute different functions
refer to ONNX functions of the same name with different `overload` names. Batch, tokens, capacity and budget are
symbolic in a function, and all other sizes are fixed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir
import torch
from onnx import helper
from torch import Tensor, nn
from torch.export import Dim

from kvexport.methods.base import Method
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.names import name_by_operators
from kvexport.ops.to_onnx import OPSET, optimize, to_onnx
from kvexport.ops.translations import TRANSLATIONS
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION
from kvexport.schema.state import STATE, StateTensor, scales_of

DOMAIN = "kvexport"
VERSION = 1
# Attributes that differ between layers that share a function: the function reads them from the node.
MERGE_CACHE_NODE = ("budget", "recent")
ROW_INPUTS = ("kept_rows", "evicted_rows", "freed_rows", "recent_slots")
# The PyTorch function `rows_of`, in ONNX.
ROWS = """<domain: "kvexport", opset_import: ["": 23]>
rows <budget, recent> (votes) => (kept_rows, evicted_rows, freed_rows, recent_slots) {
    kv_zero = Constant <value = float {0.0}> ()
    kv_one = Constant <value = int64[1] {1}> ()
    kv_axis = Constant <value = int64[1] {-1}> ()
    kv_budget_scalar = Constant <value_int: int = @budget> ()
    kv_budget = Reshape (kv_budget_scalar, kv_axis)
    kv_is_used = Greater (votes, kv_zero)
    kv_ones = Cast <to = 7> (kv_is_used)
    kv_used = ReduceSum <keepdims = 0> (kv_ones, kv_axis)
    kv_fullest_scalar = ReduceMax <keepdims = 0> (kv_used)
    kv_fullest = Reshape (kv_fullest_scalar, kv_axis)
    kv_difference = Sub (kv_fullest, kv_budget)
    kv_capacity = Shape <start = 2, end = 3> (votes)
    kv_rest = Sub (kv_capacity, kv_budget)
    kv_least = Min (kv_rest, kv_one)
    kv_over = Max (kv_difference, kv_least)
    kept_rows = ConstantOfShape (kv_budget)
    evicted_rows = ConstantOfShape (kv_over)
    freed_rows = ConstantOfShape (kv_rest)
    kv_recent_scalar = Constant <value_int: int = @recent> ()
    kv_recent = Reshape (kv_recent_scalar, kv_axis)
    recent_slots = Cast <to = 6> (kv_recent)
}"""
_merge_functions: dict[tuple[type[Method], str], onnx.FunctionProto] = {}  # keys: method and overload


def vote_attention_node_attributes(attributes: VoteAttentionAttributes) -> dict[str, Any]:
    """Return the attributes of a VoteAttention node by their names in the contract.

    List attributes have one entry for each statistic and are named like the fields of `Statistic`.
    """
    values: dict[str, Any] = {"statistics": [s.kind for s in attributes.statistics]}
    for name in (a.name for a in VOTE_ATTENTION.attributes if a.name not in values and not a.optional):
        if hasattr(attributes, name):
            values[name] = getattr(attributes, name)
        else:
            values[name] = [getattr(s, name) for s in attributes.statistics]
    if attributes.method and attributes.method.reference_queries:
        values["reference_queries"] = attributes.method.reference_queries
    if attributes.value_prefix:
        values["value_prefix"] = attributes.value_prefix
    return VOTE_ATTENTION.node_attributes(values)


def merge_cache_node_attributes(attributes: MergeCacheAttributes) -> dict[str, Any]:
    """Return the attributes of a MergeCache node by their names in the contract.

    They include the policy, if the method has one, and the layer's rotary embedding, if there is one.
    """
    return MERGE_CACHE.node_attributes(_merge_cache_values(attributes))


def _merge_cache_values(attributes: MergeCacheAttributes) -> dict[str, Any]:
    method = attributes.method
    policy = method.policy()
    values: dict[str, Any] = {
        "budget": attributes.budget,
        "sinks": attributes.sinks,
        "recent": attributes.recent,
        "sliding_window": attributes.sliding_window,
        "compresses": method.compresses,
        "recent_receives": method.recent_receives,
        "statistics": [s.kind for s in method.statistics],
    }
    if policy is not None:
        values |= policy.node_attributes()
    if attributes.rotary.inverse_frequencies:
        values["inverse_frequencies"] = attributes.rotary.inverse_frequencies
        values["rotary_interleaved"] = attributes.rotary.interleaved
        if attributes.rotary.cache_positions:
            values["cache_positions"] = True
    if attributes.value_prefix:
        values["value_prefix"] = attributes.value_prefix
    return values


def overload_of(meaning: dict[str, Any]) -> str:
    """Return the overload name of an ONNX function: a short hash that is equal for equal attributes and settings."""
    return hashlib.sha256(json.dumps(meaning, sort_keys=True, default=str).encode()).hexdigest()[:12]


@cache
def vote_attention_function(
    attributes: VoteAttentionAttributes,
    *,
    heads: tuple[int, int],
    head_sizes: tuple[int, int],
    dtype: torch.dtype,
    cache_type: str = "",
    sinks: bool = False,
) -> onnx.FunctionProto:
    """Return the ONNX function of VoteAttention.

    Args:
        attributes: The attributes of the node.
        heads: The numbers of query heads and of KV heads.
        head_sizes: The sizes of a key and of a value.
        dtype: The type of the query.
        cache_type: The type of the cache's keys and values, if it differs from the query's.
        sinks: Whether the function has the input sink_logits.
    """
    query_heads, kv_heads = heads
    key_size, value_size = head_sizes
    extra = (*scales_of(cache_type), *(attributes.method.extra_state if attributes.method else ()))
    operator = VOTE_ATTENTION.with_state(extra)
    stored = cache_type or str(dtype).removeprefix("torch.")
    stored_value = 0 if attributes.value_prefix else value_size
    sizes = {"B": 2, "H": kv_heads, "C": 8, "K": len(attributes.statistics), "D": key_size, "Dv": stored_value}
    b, t = sizes["B"], 3
    arguments = [
        torch.zeros(b, query_heads, t, key_size, dtype=dtype),
        torch.zeros(b, kv_heads, t, key_size, dtype=dtype),
        torch.zeros(b, kv_heads, t, value_size, dtype=dtype),
        torch.zeros(b, t, dtype=torch.int64),
        torch.zeros(b, 1, dtype=torch.int64),
        *_state(STATE, sizes, stored),
    ]
    batch, tokens, capacity = Dim("batch"), Dim("tokens"), Dim("capacity")
    shapes: list[dict[int, Any]] = [
        *[{0: batch, 2: tokens}] * 3,
        {0: batch, 1: tokens},
        {0: batch},
        *_state_dims(STATE, batch, capacity),
    ]
    if sinks:
        arguments.append(torch.zeros(query_heads))
        shapes.append({})
    arguments += _state(extra, sizes, stored)
    shapes += _state_dims(extra, batch, capacity)
    meaning = {
        "op": "VoteAttention",
        "heads": heads,
        "sizes": head_sizes,
        "dtype": str(dtype),
        "sinks": sinks,
        **({"cache": cache_type} if cache_type else {}),
        **vote_attention_node_attributes(attributes),
        **(_method_meaning(attributes.method) if attributes.method else {}),
    }
    before_extra = len(arguments) - len(extra)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        first = tensors[:before_extra] if sinks else (*tensors[:before_extra], None)
        return vote_attention(*first, *tensors[before_extra:], attributes=attributes)  # type: ignore[arg-type]

    graph = _trace(call, arguments, shapes)
    _read_sizes_from(graph, operator.input_names.index("position"))
    # A function without sink logits keeps their place among its inputs if extra state follows.
    absent = [] if sinks else ["sink_logits"]
    inputs = [name for name in operator.input_names if name not in absent or extra]
    return _function("VoteAttention", overload_of(meaning), graph, inputs, operator.output_names, absent=absent)


def _method_meaning(method: Method) -> dict[str, Any]:
    """Return the name and the parameters of a compression method, which identify a method that has no policy."""
    return {"method": method.name, **method.model_dump()}


def merge_cache_function(
    attributes: MergeCacheAttributes, *, kv_heads: int, head_sizes: tuple[int, int], statistics: int, cache_type: str
) -> onnx.FunctionProto:
    """Return the ONNX function of MergeCache, which reads `budget` and `recent` from the node's attributes.

    Args:
        attributes: The attributes of the node. Its budget and recent do not matter.
        kv_heads: The number of KV heads.
        head_sizes: The sizes of a key and of a value.
        statistics: The number K of statistics.
        cache_type: The type of the cache's keys and values.
    """
    shared = {name: x for name, x in _merge_cache_values(attributes).items() if name not in MERGE_CACHE_NODE}
    has_own = attributes.method.policy() is None or attributes.method.extra_state
    meaning = {
        "op": "MergeCache",
        "heads": kv_heads,
        "sizes": head_sizes,
        "dtype": cache_type,
        **shared,
        **(_method_meaning(attributes.method) if has_own else {}),
    }
    key = type(attributes.method), overload_of(meaning)
    if key not in _merge_functions:
        of_any = replace(attributes, budget=0, recent=0)
        _merge_functions[key] = _trace_merge_cache(key[1], of_any, kv_heads, head_sizes, statistics, cache_type)
    return _merge_functions[key]


def keep_merge_functions(method: Method, functions: Iterable[onnx.FunctionProto]) -> None:
    """Cache the ONNX functions of MergeCache that a forked process traced for a compression method."""
    _merge_functions.update({(type(method), function.overload): function for function in functions})


def _trace_merge_cache(
    overload: str,
    attributes: MergeCacheAttributes,
    kv_heads: int,
    head_sizes: tuple[int, int],
    statistics: int,
    cache_type: str,
) -> onnx.FunctionProto:
    extra = (*scales_of(cache_type), *attributes.method.extra_state)
    operator = MERGE_CACHE.with_state(extra)
    state = (*STATE, *extra)
    c, n, v = 8, 5, 2
    stored_value = 0 if attributes.value_prefix else head_sizes[1]
    sizes = {"B": 2, "H": kv_heads, "C": c, "K": statistics, "D": head_sizes[0], "Dv": stored_value}
    rows = [torch.zeros(n), torch.zeros(v), torch.zeros(c - n), torch.zeros(1, dtype=torch.int32)]
    arguments = [*_state(state, sizes, cache_type), *rows]
    kept, evicted, freed = Dim("kept"), Dim("evicted"), Dim("freed")
    shapes = [*_state_dims(state, Dim("batch"), Dim("capacity", min=4)), {0: kept}, {0: evicted}, {0: freed}, {}]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        *cache, kept, evicted, freed, recent = tensors
        return merge_cache(*cache, attributes=attributes, rows=(kept, evicted, freed), recent=recent)

    graph = _trace(call, arguments, shapes)
    prologue = list(onnx.parser.parse_function(ROWS).node)
    inputs = [*operator.input_names, *ROW_INPUTS]
    function = _function("MergeCache", overload, graph, inputs, operator.output_names, prologue)
    function.attribute.extend(MERGE_CACHE_NODE)
    return function


def _state(state: Sequence[StateTensor], sizes: Mapping[str, int], cache_type: str) -> list[Tensor]:
    """Return a tensor of zeros for every cache state tensor, with the given sizes, as example arguments of a trace."""
    return [
        torch.zeros(x.stored_shape(cache_type, sizes), dtype=getattr(torch, x.stored_dtype(cache_type))) for x in state
    ]


def _state_dims(state: Sequence[StateTensor], batch: Any, capacity: Any) -> list[dict[int, Any]]:
    """Return the symbolic dimensions of each cache state tensor, for a trace."""
    symbols = {"B": batch, "C": capacity}
    return [{i: symbols[d] for i, d in enumerate(x.dims) if d in symbols} for x in state]


def _trace(
    call: Callable[..., tuple[Tensor, ...]], arguments: list[Tensor], shapes: list[dict[int, Any]]
) -> onnx.GraphProto:
    class Operator(nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return call(*tensors)

    model = to_onnx(Operator(), arguments, (tuple(shapes),), TRANSLATIONS)
    optimize(model)
    name_by_operators(model.graph)
    return ir.to_proto(model).graph


def _read_sizes_from(graph: onnx.GraphProto, source: int) -> None:
    """Make a graph read its symbolic sizes from input number `source` wherever that input has them.

    All layers share this input, so a runtime computes values that depend only on the sizes once for all layers.
    """
    dims = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in graph.input}
    name = graph.input[source].name
    for node in graph.node:
        axes = {a.name: a for a in node.attribute}
        if node.op_type != "Shape" or node.input[0] not in dims or "end" not in axes:
            continue
        symbol = dims[node.input[0]][axes["start"].i]
        if symbol and axes["end"].i == axes["start"].i + 1 and symbol in dims[name]:
            node.input[0] = name
            axes["start"].i = dims[name].index(symbol)
            axes["end"].i = axes["start"].i + 1


def _constant(name: str, tensor: onnx.TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=tensor)


def _function(
    op: str,
    overload: str,
    graph: onnx.GraphProto,
    inputs: list[str],
    outputs: list[str],
    prologue: list[onnx.NodeProto] | None = None,
    absent: Sequence[str] = (),
) -> onnx.FunctionProto:
    """Return a traced graph as an ONNX function.

    Inputs and outputs are renamed, and initializers become constants.

    Args:
        op: The operator's name.
        overload: The function's overload name.
        graph: The traced graph.
        inputs: The names of the function's inputs, in the order of the graph's inputs.
        outputs: The names of the function's outputs.
        prologue: Nodes that compute the last inputs of the graph.
        absent: Inputs of the function that the graph does not have.
    """
    present = [name for name in inputs if name not in absent]
    renamed = dict(zip((v.name for v in graph.input), present, strict=True)) | dict(
        zip((v.name for v in graph.output), outputs, strict=True)
    )
    if len(renamed) != len(present) + len(outputs):
        raise AssertionError(f"{op}: an output of the trace is also an input or another output")
    nodes = list(prologue or [])
    for initializer in graph.initializer:
        nodes.append(_constant(initializer.name, initializer))
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.metadata_props[:]
        copy.doc_string = ""
        copy.input[:] = [renamed.get(x, x) for x in node.input]
        copy.output[:] = [renamed.get(x, x) for x in node.output]
        nodes.append(copy)
    computed = set(inputs) & {name for node in prologue or [] for name in node.output}
    return helper.make_function(
        DOMAIN,
        op,
        [x for x in inputs if x not in computed],
        outputs,
        nodes,
        [helper.make_opsetid("", OPSET)],
        overload=overload,
    )
