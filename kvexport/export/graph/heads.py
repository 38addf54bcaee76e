"""Layers whose KV heads have budgets, and so caches, of their own.

    y, present = VoteAttention(query, key, value, ..., past)          all heads of a layer
=>  Split of query, key and value by KV heads; for each a VoteAttention over its own cache; y = Concat
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from kvexport.cache import CachePlan, LayerGeometry, layer_caches
from kvexport.export.passes.nodes import is_op
from kvexport.ops.onnx_function import DOMAIN
from kvexport.schema.operators import VOTE_ATTENTION, Operator

HEADS = {"query": 1, "key": 1, "value": 1, "sink_logits": 0}  # the dimension that counts heads


def layers_plan(plan: CachePlan, geometry: Sequence[LayerGeometry]) -> CachePlan:
    """Return a cache plan with one KV cache for each layer, to trace a decoder with.

    The capacity of a layer's cache is that of the layer's first cache in `plan`, where KV heads may have caches of
    their own.
    """
    caches = zip(geometry, layer_caches(geometry, len(plan.caches)), strict=True)
    own_caches = tuple(replace(plan.caches[own[0]], kv_heads=layer.kv_heads) for layer, own in caches)
    return replace(plan, caches=own_caches)


def split_heads(graph: ir.Graph, geometry: Sequence[LayerGeometry], plan: CachePlan) -> None:
    """Split each VoteAttention node of a decoder into nodes that each read one KV cache of `plan`, in place.

    The decoder was traced with `layers_plan`, that is with one cache for each layer. In `plan` KV heads have caches of
    their own.
    """
    if len(plan.caches) == len(geometry):
        return
    operator, caches = VOTE_ATTENTION.with_state(plan.caches[0].extra), layer_caches(geometry, len(plan.caches))
    nodes = {n.attributes["layer"].as_int(): n for n in graph if is_op(n, VOTE_ATTENTION.name, DOMAIN)}
    tensors = [(i, x) for i in nodes for x in plan.caches[0].state]
    state = {name for i, x in tensors for name in (x.past(i), x.present(i))}
    graph.inputs[:] = [value for value in graph.inputs if value.name not in state]
    graph.outputs[:] = [value for value in graph.outputs if value.name not in state]
    for i, own in enumerate(caches):
        _split(graph, nodes[i], own, plan, operator)


def _split(graph: ir.Graph, node: ir.Node, caches: range, plan: CachePlan, operator: Operator) -> None:
    inputs_by_name = dict(zip(operator.input_names, node.inputs, strict=False))
    heads_by_cache = {name: _split_heads(graph, node, inputs_by_name.get(name), name, caches) for name in HEADS}
    outputs = []
    for index, cache in enumerate(caches):
        shapes = plan.caches[cache].shapes(1)
        past = {f"past_{x.name}": (x, inputs_by_name[f"past_{x.name}"]) for x in plan.caches[cache].state}
        past_values, present_values = {}, []
        for (name, (tensor, old)), present in zip(past.items(), node.outputs[1:], strict=True):
            assert old is not None and old.shape is not None
            shape = ir.Shape([old.shape[0], *shapes[tensor.name][1:]])
            past_values[name] = ir.Value(name=tensor.past(cache), shape=shape, type=old.type)
            present_values.append(ir.Value(name=tensor.present(cache), shape=shape, type=present.type))
        own_heads = {name: heads[index] for name, heads in heads_by_cache.items()}
        inputs_of_cache = {**inputs_by_name, **own_heads, **past_values}
        inputs = [inputs_of_cache[name] for name in operator.input_names]
        output = ir.Value(name=f"cache.{cache}.output", type=node.outputs[0].type)
        layer, results = [ir.AttrInt64("layer", cache)], [output, *present_values]
        graph.insert_before(node, ir.Node(DOMAIN, node.op_type, inputs, layer, outputs=results, version=node.version))
        graph.inputs.extend(past_values.values())
        graph.outputs.extend(present_values)
        outputs.append(output)
    whole = ir.Value(name=f"caches.{caches[0]}.output", shape=node.outputs[0].shape, type=node.outputs[0].type)
    graph.insert_before(node, ir.Node("", "Concat", outputs, [ir.AttrInt64("axis", 1)], outputs=[whole]))
    node.outputs[0].replace_all_uses_with(whole)
    graph.remove(node, safe=True)


def _split_heads(
    graph: ir.Graph, node: ir.Node, value: ir.Value | None, name: str, caches: range
) -> Sequence[ir.Value | None]:
    """Split one input of a VoteAttention node by KV heads, and return the slice that belongs to each cache.

    The result is None for every cache if the node lacks the input.
    """
    if value is None:
        return [None] * len(caches)
    attributes = [ir.AttrInt64("axis", HEADS[name]), ir.AttrInt64("num_outputs", len(caches))]
    outputs = [ir.Value(name=f"cache.{cache}.{name}", type=value.type) for cache in caches]
    graph.insert_before(node, ir.Node("", "Split", [value], attributes, outputs=outputs))
    return outputs
