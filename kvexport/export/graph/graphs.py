"""The ONNX graphs of an artifact: from traces, the cache plan, and the size of the vocabulary."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper, numpy_helper

from kvexport.export.graph.experts import finish_experts, is_experts_weight
from kvexport.export.passes import ENCODER_PASSES
from kvexport.export.passes.forms import linear_functions
from kvexport.export.passes.library import inlined, put_products
from kvexport.export.passes.packed import put_packed
from kvexport.export.passes.rewrite import Pass, run_passes
from kvexport.export.weights.write import Location
from kvexport.methods.base import Method
from kvexport.ops.experts import experts_function
from kvexport.ops.layer_state import merge_cache_functions, vote_attention_functions
from kvexport.ops.linear_attention import linear_attention_functions, update_rules
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import DOMAIN, VERSION, merge_cache_node_attributes, vote_attention_node_attributes
from kvexport.ops.packed import PackedFormat
from kvexport.ops.to_onnx import OPSET
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.plan.cache import CachePlan, LayerCache, LayerGeometry
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION

IR_VERSION = 11
# How many of the largest logits are found, unless the vocabulary is smaller. ONNX Runtime's TopK on CUDA divides a row
# among thread blocks only for at most 256 sorted results along the last dimension (docs/concepts/cuda-kernels.md).
MOST_LOGITS = 256
PLUGIN = {"plugin_version": "1", "plugin_namespace": DOMAIN}


Attention = tuple[list[onnx.FunctionProto], dict[str, Any]]
"""The ONNX functions of a layer's VoteAttention, that function itself first, and the attributes of its node."""


def attentions_of(
    plan: CachePlan, attributes: Sequence[VoteAttentionAttributes], geometry: Sequence[LayerGeometry], dtype: str
) -> list[Attention]:
    attentions = []
    for cache, layer, own in zip(plan.caches, geometry, attributes, strict=True):
        functions = vote_attention_functions(
            own,
            heads=(layer.query_heads, layer.kv_heads),
            head_sizes=(layer.key_size, layer.value_size),
            dtype=getattr(torch, dtype),
            cache_type="" if cache.dtype == dtype else cache.dtype,
            sinks=layer.sink_logits,
            capacity=cache.capacity,
        )
        attentions.append((functions, vote_attention_node_attributes(own, cache.capacity)))
    return attentions


def finish_decoder(
    model: ir.Model,
    locations: Mapping[str, Location],
    folder: Path,
    attentions: Sequence[Attention],
    packings: Mapping[str, PackedFormat],
    passes: Sequence[Pass],
    *,
    library: bool,
) -> onnx.ModelProto:
    expert_forms = finish_experts(model.graph, packings)
    matrices = {name: x for name, x in packings.items() if not is_experts_weight(model.graph, name)}
    renamed = put_packed(model, matrices, lambda a, b: locations[a] == locations[b], library=library)
    _put_weights(model.graph, locations, renamed, folder)
    run_passes(model, passes)
    products = put_products(model) if library else linear_functions(model.graph)
    proto = ir.to_proto(model)
    used: dict[tuple[str, str], onnx.FunctionProto] = {}
    for node in proto.graph.node:
        if node.domain != DOMAIN or node.op_type != VOTE_ATTENTION.name:
            continue
        functions, attributes = attentions[next(a.i for a in node.attribute if a.name == "layer")]
        while node.input and not node.input[-1]:
            node.input.pop()
        used |= {(function.name, function.overload): function for function in functions}
        _set_attributes(node, functions[0].overload, attributes)
    recurrences = [x for rule in update_rules(proto.graph) for x in linear_attention_functions(rule)]
    others = products if library else [*products, *map(experts_function, expert_forms)]
    finished = _finish(proto, [*used.values(), *recurrences, *others])
    return inlined(finished) if library else finished


def finish_encoder(model: ir.Model, locations: Mapping[str, Location], folder: Path) -> onnx.ModelProto:
    """Turn a traced image encoder into the ONNX graph vision.onnx, whose weights are external data."""
    _put_weights(model.graph, locations, {}, folder)
    run_passes(model, ENCODER_PASSES)
    products = linear_functions(model.graph)
    return _finish(ir.to_proto(model), products)


def _put_weights(graph: ir.Graph, locations: Mapping[str, Location], renamed: Mapping[str, str], folder: Path) -> None:
    """Let initializers without data refer to their bytes in weight files; `renamed` has names that differ there."""
    for name, value in graph.initializers.items():
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


def open_slots(decoder: onnx.ModelProto, plan: CachePlan) -> None:
    """Make the number of KV-cache slots a free dimension of the decoder, so that caches of any size can use one graph.

    All KV heads of a layer must have the same capacity. Then the number of slots occurs only in the shapes of inputs
    and outputs, and of views for attention that reads a cache after its update.
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
    constants = {x.name: x for x in decoder.graph.initializer}
    for node in decoder.graph.node:
        if node.op_type == "Reshape" and (axis := axes.get(node.input[0])) is not None:
            shape = np.array(numpy_helper.to_array(constants[node.input[1]]))
            shape[0], shape[axis + 1] = 0, -1  # [B, H S, ...] becomes [B, H, S, ...], of any S
            node.input[1] = f"{node.name}.slots"
            decoder.graph.initializer.append(numpy_helper.from_array(shape, node.input[1]))
            del node.attribute[:]  # `allowzero`, with which 0 would be no size of the input


def merge_model(plan: CachePlan, method: Method) -> onnx.ModelProto | None:
    """Return merge.onnx, which compresses KV caches to their budgets; None if no cache can exceed its budget."""
    nodes, inputs, outputs = [], [], []
    functions: dict[tuple[str, str], onnx.FunctionProto] = {}
    for i, layer in enumerate(plan.caches):
        if not layer.merges:
            continue
        attributes = merge_attributes(layer, method)
        own = merge_cache_functions(
            attributes, head_sizes=(layer.key_size, layer.value_size), cache_type=layer.dtype, capacity=layer.capacity
        )
        functions |= {(function.name, function.overload): function for function in own}
        past, present = [x.past(i) for x in layer.state], [x.present(i) for x in layer.state]
        node = helper.make_node(MERGE_CACHE.name, past, present, name=f"layer.{i}.merge", domain=DOMAIN)
        _set_attributes(node, own[0].overload, merge_cache_node_attributes(attributes, layer.capacity))
        nodes.append(node)
        inputs += [_state_info(name, layer, tensor.name) for name, tensor in zip(past, layer.state, strict=True)]
        outputs += [_state_info(name, layer, tensor.name) for name, tensor in zip(present, layer.state, strict=True)]
    if not nodes:
        return None
    graph = helper.make_graph(nodes, "merge", inputs, outputs)
    return _finish(helper.make_model(graph, producer_name="kvexport"), list(functions.values()))


def top_logits_model(vocabulary: int) -> onnx.ModelProto:
    """Return top_logits.onnx, which finds the largest logits of every row on the device that computed the logits.

    The input is logits [B, 1, vocabulary] float32. With n the smaller of MOST_LOGITS and `vocabulary`, the outputs are:
    values [B, 1, n] float32, the n largest logits, descending; ids [B, 1, n] int32, their token ids; mass [B, 1, 1]
    float32, the sum over the row of exp(logit - largest logit); token [B, 1] int64, the id of the largest logit (the
    lowest id among equals), for the decoder's next call. If a row has NaN, `token` is the last id of the vocabulary.
    """
    n = min(MOST_LOGITS, vocabulary)
    nodes = [
        helper.make_node("TopK", ["logits", "n"], ["values", "places"], name="top", axis=-1, largest=1, sorted=1),
        helper.make_node("Cast", ["places"], ["ids"], name="ids", to=TensorProto.INT32),
        helper.make_node("ReduceMax", ["logits", "last"], ["largest"], name="largest", keepdims=1),
        helper.make_node("Sub", ["logits", "largest"], ["below"], name="below"),
        helper.make_node("Exp", ["below"], ["weights"], name="weights"),
        helper.make_node("ReduceSum", ["weights", "last"], ["mass"], name="mass", keepdims=1),
        # Some devices' TopK order equal logits in any way, but greedy decoding takes the lowest id.
        helper.make_node("Equal", ["values", "largest"], ["equal"], name="equal"),
        helper.make_node("Where", ["equal", "places", "end"], ["candidates"], name="candidates"),
        helper.make_node("ReduceMin", ["candidates", "last"], ["token"], name="token", keepdims=0),
    ]
    constants = {"n": [n], "last": [-1], "end": [vocabulary - 1]}
    graph = helper.make_graph(
        nodes,
        "top_logits",
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1, vocabulary])],
        [
            helper.make_tensor_value_info("values", TensorProto.FLOAT, ["batch", 1, n]),
            helper.make_tensor_value_info("ids", TensorProto.INT32, ["batch", 1, n]),
            helper.make_tensor_value_info("mass", TensorProto.FLOAT, ["batch", 1, 1]),
            helper.make_tensor_value_info("token", TensorProto.INT64, ["batch", 1]),
        ],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )
    return helper.make_model(
        graph, producer_name="kvexport", ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
    )


def merge_attributes(layer: LayerCache, method: Method) -> tuple[MergeCacheAttributes, ...]:
    return tuple(
        MergeCacheAttributes(
            method, budget, layer.sinks, recent, layer.sliding_window, layer.rotary, layer.value_prefix
        )
        for budget, recent in zip(layer.budget, layer.recent, strict=True)
    )


def _state_info(name: str, layer: LayerCache, kind: str) -> onnx.ValueInfoProto:
    dtype = helper.np_dtype_to_tensor_dtype(layer.dtypes()[kind])
    return helper.make_tensor_value_info(name, dtype, ["batch", *layer.shapes(1)[kind][1:]])


def _set_attributes(node: onnx.NodeProto, overload: str, attributes: dict[str, Any]) -> None:
    node.overload = overload
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in {**attributes, **PLUGIN}.items())


def _finish(proto: onnx.ModelProto, functions: list[onnx.FunctionProto]) -> onnx.ModelProto:
    proto.ir_version = IR_VERSION
    proto.producer_name, proto.producer_version, proto.doc_string = "kvexport", "", ""
    del proto.opset_import[:]
    used = (*functions, *proto.graph.node)
    domains = dict.fromkeys(one.domain for one in used if one.domain not in ("", DOMAIN))
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
