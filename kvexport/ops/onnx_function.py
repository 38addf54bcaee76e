"""The ONNX functions of VoteAttention and MergeCache over equal KV heads, traced from their definitions in PyTorch.

The tensors of these functions are views [B, H, C, ...] of a layer's state: B sequences, H KV heads of C slots each.
`kvexport.ops.layer_state` makes the functions of the operators from them. No library has a kernel for a function of
equal heads, because the function's name ends with a digest. Batch, tokens, capacity and budget are symbolic in a
function, and all other sizes are fixed.
"""

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

from kvexport.files import json_digest
from kvexport.methods.base import Method
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.to_onnx import OPSET, optimize, to_onnx
from kvexport.ops.translations import TRANSLATIONS
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION
from kvexport.schema.state import STATE, StateTensor, scales_of

DOMAIN = "kvexport"
VERSION = 1
# Attributes that differ between layers that share a function: the function reads them from the node.
MERGE_CACHE_NODE = ("budget", "recent")
HEADS_MERGE = "HeadsMergeCache"
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


def vote_attention_node_attributes(attributes: VoteAttentionAttributes, capacity: Sequence[int] = ()) -> dict[str, Any]:
    """Return the attributes of a VoteAttention node by their names in docs/reference/contract.md.

    Attributes of an attention statistic are lists with an entry for each statistic, named like the fields of
    `Statistic`.
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
    return VOTE_ATTENTION.node_attributes(values | _capacity(capacity))


def merge_cache_node_attributes(
    attributes: Sequence[MergeCacheAttributes], capacity: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the attributes of a MergeCache node by their names in docs/reference/contract.md."""
    own = {"budget": [x.budget for x in attributes], "recent": [x.recent for x in attributes]}
    return MERGE_CACHE.node_attributes(_merge_cache_values(attributes[0]) | own | _capacity(capacity))


def _capacity(capacity: Sequence[int]) -> dict[str, Any]:
    """Return the ONNX attribute `capacity`, the slots of each KV head; no attribute if all heads have equally many."""
    return {"capacity": list(capacity)} if len({*capacity}) > 1 else {}


def _merge_cache_values(attributes: MergeCacheAttributes) -> dict[str, Any]:
    method, policy = attributes.method, attributes.policy
    values: dict[str, Any] = {
        "sinks": attributes.sinks,
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
    """Return the overload name of an ONNX function: a short hash of the attributes and settings `meaning`."""
    return json_digest(meaning)[:12]


@cache
def heads_vote_attention_function(
    attributes: VoteAttentionAttributes,
    *,
    heads: tuple[int, int],
    head_sizes: tuple[int, int],
    dtype: torch.dtype,
    cache_type: str = "",
    sinks: bool = False,
) -> onnx.FunctionProto:
    """Return the ONNX function of VoteAttention over KV heads of equal capacity.

    If values are read from keys (latent attention), the function has no state tensor `value`.
    """
    query_heads, kv_heads = heads
    key_size, value_size = head_sizes
    extra = (*scales_of(cache_type), *(attributes.method.extra_state if attributes.method else ()))
    operator = VOTE_ATTENTION.with_state(extra)
    stored = cache_type or str(dtype).removeprefix("torch.")
    state = _stored(STATE, attributes.value_prefix)
    sizes = {"B": 2, "H": kv_heads, "S": 8, "K": len(attributes.statistics), "D": key_size, "Dv": value_size}
    b, t = sizes["B"], 3
    arguments = [
        torch.zeros(b, query_heads, t, key_size, dtype=dtype),
        torch.zeros(b, kv_heads, t, key_size, dtype=dtype),
        torch.zeros(b, kv_heads, t, value_size, dtype=dtype),
        torch.zeros(b, t, dtype=torch.int64),
        torch.zeros(b, 1, dtype=torch.int64),
        *_state(state, sizes, stored),
    ]
    batch, tokens, capacity = Dim("batch"), Dim("tokens"), Dim("capacity")
    shapes: list[dict[int, Any]] = [
        *[{0: batch, 2: tokens}] * 3,
        {0: batch, 1: tokens},
        {0: batch},
        *_state_dims(state, batch, capacity),
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
        first, own = list(tensors[:before_extra]), tensors[before_extra:]
        if not sinks:
            first.append(None)  # type: ignore[arg-type]
        if not attributes.value_prefix:
            return vote_attention(*first, *own, attributes=attributes)
        first.insert(6, first[5][..., :0])
        output, key, _, *rest = vote_attention(*first, *own, attributes=attributes)
        return (output, key, *rest)

    graph = _trace(call, arguments, shapes)
    _read_sizes_from(graph, operator.input_names.index("position"))
    absent = [*([] if sinks else ["sink_logits"]), *(["past_value"] if attributes.value_prefix else [])]
    inputs = [name for name in operator.input_names if name not in absent]
    outputs = [name for name in operator.output_names if name != "present_value" or not attributes.value_prefix]
    return _function(f"HeadsVoteAttention_{overload_of(meaning)}", graph, inputs, outputs)


def _method_meaning(method: Method) -> dict[str, Any]:
    return {"method": method.name, **method.model_dump()}


def heads_merge_cache_function(
    attributes: MergeCacheAttributes, *, kv_heads: int, head_sizes: tuple[int, int], statistics: int, cache_type: str
) -> onnx.FunctionProto:
    """Return the ONNX function of MergeCache over KV heads of equal capacity, budget and recent window.

    If values are read from keys (latent attention), the function has no state tensor `value`.
    """
    shared = _merge_cache_values(attributes)
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
    own = {function.name.partition("_")[::2]: function for function in functions}
    _merge_functions.update({(type(method), key): x for (name, key), x in own.items() if name == HEADS_MERGE})


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
    state = _stored((*STATE, *extra), attributes.value_prefix)
    c, n, v = 8, 5, 2
    sizes = {"B": 2, "H": kv_heads, "S": c, "K": statistics, "D": head_sizes[0], "Dv": head_sizes[1]}
    rows = [torch.zeros(n), torch.zeros(v), torch.zeros(c - n), torch.zeros(1, dtype=torch.int32)]
    arguments = [*_state(state, sizes, cache_type), *rows]
    kept, evicted, freed = Dim("kept"), Dim("evicted"), Dim("freed")
    shapes = [*_state_dims(state, Dim("batch"), Dim("capacity", min=4)), {0: kept}, {0: evicted}, {0: freed}, {}]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        *cache, kept, evicted, freed, recent = tensors
        if attributes.value_prefix:
            cache.insert(1, cache[0][..., :0])
        result = merge_cache(*cache, attributes=attributes, rows=(kept, evicted, freed), recent=recent)
        return (result[0], *result[2:]) if attributes.value_prefix else result

    graph = _trace(call, arguments, shapes)
    prologue = list(onnx.parser.parse_function(ROWS).node)
    absent = ("value", "present_value") if attributes.value_prefix else ()
    inputs = [*(name for name in operator.input_names if name not in absent), *ROW_INPUTS]
    outputs = [name for name in operator.output_names if name not in absent]
    function = _function(f"{HEADS_MERGE}_{overload}", graph, inputs, outputs, prologue)
    function.attribute.extend(MERGE_CACHE_NODE)
    return function


def _stored(state: Sequence[StateTensor], value_prefix: int) -> list[StateTensor]:
    return [x for x in state if not (value_prefix and x.name == "value")]


def _state(state: Sequence[StateTensor], sizes: Mapping[str, int], cache_type: str) -> list[Tensor]:
    shapes = [x.stored_shape(cache_type, sizes) for x in state]
    views = [
        shape if x.slot_axis is None else (shape[0], sizes["H"], *shape[1:])
        for x, shape in zip(state, shapes, strict=True)
    ]
    types = [getattr(torch, x.stored_dtype(cache_type)) for x in state]
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(views, types, strict=True)]


def _state_dims(state: Sequence[StateTensor], batch: Any, capacity: Any) -> list[dict[int, Any]]:
    return [{0: batch} if x.slot_axis is None else {0: batch, x.slot_axis + 1: capacity} for x in state]


def _trace(
    call: Callable[..., tuple[Tensor, ...]], arguments: list[Tensor], shapes: list[dict[int, Any]]
) -> onnx.GraphProto:
    class Operator(nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return call(*tensors)

    model = to_onnx(Operator(), arguments, (tuple(shapes),), TRANSLATIONS)
    optimize(model)
    return ir.to_proto(model).graph


def _read_sizes_from(graph: onnx.GraphProto, source: int) -> None:
    """Let a graph's Shape nodes read symbolic sizes from one input, number `source`, which all layers share.

    A runtime then computes values that depend only on sizes once, instead of once for each layer.
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
    name: str,
    graph: onnx.GraphProto,
    inputs: list[str],
    outputs: list[str],
    prologue: list[onnx.NodeProto] | None = None,
) -> onnx.FunctionProto:
    renamed = dict(zip((v.name for v in graph.input), inputs, strict=True)) | dict(
        zip((v.name for v in graph.output), outputs, strict=True)
    )
    if len(renamed) != len(inputs) + len(outputs):
        raise AssertionError(f"{name}: an output of the trace is also an input or another output")
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
    computed = set(inputs) & {output for node in prologue or [] for output in node.output}
    given = [x for x in inputs if x not in computed]
    return helper.make_function(DOMAIN, name, given, outputs, nodes, [helper.make_opsetid("", OPSET)])
