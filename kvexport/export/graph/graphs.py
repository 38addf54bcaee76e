"""The two ONNX graphs of an artifact, decoder.onnx and merge.onnx, from a traced decoder and a cache plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import helper

from kvexport.cache import CachePlan, LayerCache, LayerGeometry, cache_geometry, layer_caches
from kvexport.export.graph.experts import finish_experts, is_experts_weight
from kvexport.export.graph.heads import put_caches_of_heads
from kvexport.export.graph.names import name_nodes
from kvexport.export.graph.tracer import layer_attributes
from kvexport.export.passes.linear.forms import linear_functions, take_floats
from kvexport.export.passes.packed import put_packed
from kvexport.export.passes.report import Pass, run_passes
from kvexport.export.weights.write import Location
from kvexport.methods.base import Method
from kvexport.ops.experts import experts_function
from kvexport.ops.linear_attention import linear_attention_functions, update_rules
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import (
    DOMAIN,
    VERSION,
    merge_cache_function,
    merge_cache_node_attributes,
    vote_attention_function,
    vote_attention_node_attributes,
)
from kvexport.ops.packed import PackedFormat
from kvexport.ops.ragged import (
    callee,
    ragged_merge_cache_function,
    ragged_node_attributes,
    ragged_vote_attention_function,
)
from kvexport.ops.to_onnx import OPSET
from kvexport.schema.operators import MERGE_CACHE, RAGGED, VOTE_ATTENTION, ragged

IR_VERSION = 11
PLUGIN = {"plugin_version": "1", "plugin_namespace": DOMAIN}


def attention_functions(
    plan: CachePlan, method: Method, geometry: list[LayerGeometry], dtype: str
) -> list[onnx.FunctionProto]:
    """Return the ONNX function of each cache's VoteAttention. Caches with equal attributes share one function.

    Args:
        plan: The cache plan.
        method: The compression method.
        geometry: The attention geometry of every layer.
        dtype: The type of queries.
    """
    return [
        vote_attention_function(
            layer_attributes(method, layer, cache.value_prefix),
            heads=(layer.query_heads, layer.kv_heads),
            head_sizes=(layer.key_size, layer.value_size),
            dtype=getattr(torch, dtype),
            cache_type="" if cache.dtype == dtype else cache.dtype,
            sinks=layer.sink_logits,
        )
        for cache, layer in zip(plan.caches, cache_geometry(geometry, len(plan.caches)), strict=True)
    ]


def finish_decoder(
    model: ir.Model,
    locations: Mapping[str, Location],
    folder: Path,
    method: Method,
    geometry: list[LayerGeometry],
    plan: CachePlan,
    functions: list[onnx.FunctionProto],
    packings: Mapping[str, PackedFormat],
    passes: Sequence[Pass],
    *,
    float_input: bool,
) -> onnx.ModelProto:
    """Turn the traced PyTorch decoder into the ONNX decoder that an artifact stores.

    Weights become external data, KV caches become inputs and outputs of the graph, and the ONNX function of each
    VoteAttention (the attention operator) is added.

    Args:
        model: The trace.
        locations: The place of every initializer's bytes.
        folder: The folder of the weights.
        method: The compression method.
        geometry: The attention geometry of every layer.
        plan: The cache plan.
        functions: The VoteAttention function of each cache.
        packings: The formats of packed weights, by initializer.
        passes: The rewrites of the graph.
        float_input: Whether packed weights are multiplied with inputs that are not rounded.

    Returns:
        The ONNX model.
    """
    expert_forms = finish_experts(model.graph, packings, float_input=float_input)
    matrices = {name: x for name, x in packings.items() if not is_experts_weight(model.graph, name)}
    renamed = put_packed(model, matrices, lambda a, b: locations[a] == locations[b])
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            location = locations[renamed.get(name, name)]
            assert value.dtype is not None and value.shape is not None
            value.const_value = ir.ExternalTensor(
                location.file,
                location.offset,
                location.nbytes,
                value.dtype,
                shape=value.shape,
                name=name,
                base_dir=folder,
            )
    run_passes(model, passes)
    put_caches_of_heads(model.graph, geometry, plan)
    if float_input:
        take_floats(model.graph)
    name_nodes(model.graph)
    proto, layer_geometry = ir.to_proto(model), cache_geometry(geometry, len(plan.caches))
    callees: dict[str, onnx.FunctionProto] = {}
    used: dict[str, onnx.FunctionProto] = {}
    for node in proto.graph.node:
        if node.domain != DOMAIN or node.op_type.removeprefix(RAGGED) != VOTE_ATTENTION.name:
            continue
        i = next(a.i for a in node.attribute if a.name == "layer")
        while node.input and not node.input[-1]:
            node.input.pop()
        prefix = plan.caches[i].value_prefix
        attributes = vote_attention_node_attributes(layer_attributes(method, layer_geometry[i], prefix))
        function = functions[i]
        if node.op_type != VOTE_ATTENTION.name:
            count = (len(node.output) - 1) // len(plan.caches[i].state)
            function = ragged_vote_attention_function(
                callee(function, callees),
                {**attributes, **PLUGIN},
                caches=count,
                extra=plan.caches[i].extra,
                sinks=layer_geometry[i].sink_logits,
            )
        used[function.overload] = function
        _set_attributes(node, function.overload, attributes)
    recurrences = [x for rule in update_rules(proto.graph) for x in linear_attention_functions(rule)]
    others = [*linear_functions(model.graph), *map(experts_function, expert_forms)]
    return _finish(proto, [*used.values(), *callees.values(), *recurrences, *others])


def open_slots(decoder: onnx.ModelProto, plan: CachePlan) -> None:
    """Make the number of cache slots a free dimension of the decoder, so that caches of any size can use its graph.

    Only the shapes of inputs and outputs contain a capacity; the computation does not depend on it.
    """
    axes = {
        name: x.slot_axis
        for i, layer in enumerate(plan.caches)
        for x in layer.state
        for name in (x.past(i), x.present(i))
    }
    for value in (*decoder.graph.input, *decoder.graph.output):
        if (axis := axes.get(value.name)) is not None:
            value.type.tensor_type.shape.dim[axis].dim_param = f"slots.{value.name.split('.')[1]}"


def merge_model(plan: CachePlan, method: Method, geometry: Sequence[LayerGeometry]) -> onnx.ModelProto | None:
    """Return merge.onnx, the graph that evicts and merges cache entries until every layer is within its budget.

    Its inputs and outputs are the cache state of every layer that can exceed its budget. The result is None if no layer
    can. If the KV heads of a layer have separate caches, one node merges all of them.

    Args:
        plan: The cache plan.
        method: The compression method.
        geometry: The attention geometry of every layer.
    """
    nodes, inputs, outputs = [], [], []
    functions: dict[str, onnx.FunctionProto] = {}
    callees: dict[str, onnx.FunctionProto] = {}
    for layer, of_layer in enumerate(layer_caches(geometry, len(plan.caches))):
        numbers = [i for i in of_layer if plan.caches[i].merges]
        if not numbers:
            continue
        caches = [plan.caches[i] for i in numbers]
        attributes = [merge_attributes(cache, method) for cache in caches]
        function = merge_cache_function(
            attributes[0],
            kv_heads=caches[0].kv_heads,
            head_sizes=(caches[0].key_size, caches[0].value_size),
            statistics=caches[0].statistics,
            cache_type=caches[0].dtype,
        )
        operator, values = MERGE_CACHE, merge_cache_node_attributes(attributes[0])
        if len(plan.caches) != len(geometry):
            own = [{**merge_cache_node_attributes(x), **PLUGIN} for x in attributes]
            function = ragged_merge_cache_function(callee(function, callees), own, caches[0].extra)
            operator, values = ragged(MERGE_CACHE, len(caches)), ragged_node_attributes(attributes)
        functions[function.overload] = function
        state = [(i, tensor) for i in numbers for tensor in plan.caches[i].state]
        past, present = [tensor.past(i) for i, tensor in state], [tensor.present(i) for i, tensor in state]
        node = helper.make_node(operator.name, past, present, name=f"layer.{layer}.merge", domain=DOMAIN)
        _set_attributes(node, function.overload, values)
        nodes.append(node)
        inputs += [_state_info(tensor.past(i), plan.caches[i], tensor.name) for i, tensor in state]
        outputs += [_state_info(tensor.present(i), plan.caches[i], tensor.name) for i, tensor in state]
    if not nodes:
        return None
    graph = helper.make_graph(nodes, "merge", inputs, outputs)
    return _finish(helper.make_model(graph, producer_name="kvexport"), [*functions.values(), *callees.values()])


def merge_attributes(layer: LayerCache, method: Method) -> MergeCacheAttributes:
    """Return the attributes of the MergeCache node that compresses the KV cache of one layer."""
    return MergeCacheAttributes(
        method, layer.budget, layer.sinks, layer.recent, layer.sliding_window, layer.rotary, layer.value_prefix
    )


def _state_info(name: str, layer: LayerCache, kind: str) -> onnx.ValueInfoProto:
    dtype = helper.np_dtype_to_tensor_dtype(layer.dtypes()[kind])
    return helper.make_tensor_value_info(name, dtype, ["batch", *layer.shapes(1)[kind][1:]])


def _set_attributes(node: onnx.NodeProto, overload: str, attributes: dict[str, Any]) -> None:
    node.overload = overload
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in {**attributes, **PLUGIN}.items())


def _finish(proto: onnx.ModelProto, functions: list[onnx.FunctionProto]) -> onnx.ModelProto:
    """Attach functions to an ONNX model, set its versions, and remove the exporter's notes about the machine."""
    proto.ir_version = IR_VERSION
    proto.producer_name, proto.producer_version, proto.doc_string = "kvexport", "", ""
    del proto.opset_import[:]
    domains = dict.fromkeys(function.domain for function in functions if function.domain != DOMAIN)
    others = [helper.make_opsetid(domain, VERSION) for domain in domains]
    proto.opset_import.extend([helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION), *others])
    del proto.functions[:]
    proto.functions.extend(functions)
    graph = proto.graph
    del proto.metadata_props[:]
    del graph.metadata_props[:]
    for item in [*graph.node, *graph.input, *graph.output, *graph.initializer, *graph.value_info]:
        del item.metadata_props[:]
        item.doc_string = ""
    return proto
