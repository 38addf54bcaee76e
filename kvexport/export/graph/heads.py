"""Layers whose KV heads have separate budgets, and therefore separate caches.

    y, present  = VoteAttention(query, key, value, ..., past)          the cache of a layer
=>  y, presents = RaggedVoteAttention(query, key, value, ..., pasts)   the caches of its KV heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from kvexport.cache import CachePlan, LayerGeometry, layer_caches
from kvexport.export.passes.nodes import is_op
from kvexport.ops.onnx_function import DOMAIN
from kvexport.schema.operators import VOTE_ATTENTION, ragged


def layers_plan(plan: CachePlan, geometry: Sequence[LayerGeometry]) -> CachePlan:
    """Return a cache plan with one KV cache for each layer, to trace a decoder with.

    The capacity of a layer's cache is that of the layer's first cache in `plan`, in which KV heads may have separate
    caches.
    """
    caches = zip(geometry, layer_caches(geometry, len(plan.caches)), strict=True)
    own_caches = tuple(replace(plan.caches[own[0]], kv_heads=layer.kv_heads) for layer, own in caches)
    return replace(plan, caches=own_caches)


def put_caches_of_heads(graph: ir.Graph, geometry: Sequence[LayerGeometry], plan: CachePlan) -> None:
    """Replace each VoteAttention node of a decoder by a RaggedVoteAttention node over its KV heads' caches, in place.

    The decoder was traced with `layers_plan`, that is with one cache for each layer. The graph does not change if
    `plan` has one cache for each layer too.
    """
    if len(plan.caches) == len(geometry):
        return
    caches = layer_caches(geometry, len(plan.caches))
    nodes = {n.attributes["layer"].as_int(): n for n in graph if is_op(n, VOTE_ATTENTION.name, DOMAIN)}
    tensors = [(i, x) for i in nodes for x in plan.caches[0].state]
    state = {name for i, x in tensors for name in (x.past(i), x.present(i))}
    graph.inputs[:] = [value for value in graph.inputs if value.name not in state]
    graph.outputs[:] = [value for value in graph.outputs if value.name not in state]
    for i, own in enumerate(caches):
        _replace(graph, nodes[i], own, plan)


def _replace(graph: ir.Graph, node: ir.Node, caches: range, plan: CachePlan) -> None:
    """Replace a VoteAttention node by a RaggedVoteAttention node, whose attribute `layer` is its first cache."""
    extra, state = plan.caches[caches[0]].extra, plan.caches[caches[0]].state
    values = dict(zip(VOTE_ATTENTION.with_state(extra).input_names, node.inputs, strict=False))
    outputs = [ir.Value(name=f"caches.{caches[0]}.output", shape=node.outputs[0].shape, type=node.outputs[0].type)]
    for i, cache in enumerate(caches):
        shapes = plan.caches[cache].shapes(1)
        for tensor, present in zip(state, node.outputs[1:], strict=True):
            old = values[f"past_{tensor.name}"]
            assert old is not None and old.shape is not None
            shape = ir.Shape([old.shape[0], *shapes[tensor.name][1:]])
            past = ir.Value(name=tensor.past(cache), shape=shape, type=old.type)
            values[f"past_{tensor.name}.{i}"] = past
            graph.inputs.append(past)
            outputs.append(ir.Value(name=tensor.present(cache), shape=shape, type=present.type))
    operator = ragged(VOTE_ATTENTION, len(caches), extra)
    inputs, layer = [values.get(name) for name in operator.input_names], [ir.AttrInt64("layer", caches[0])]
    graph.insert_before(node, ir.Node(DOMAIN, operator.name, inputs, layer, outputs=outputs, version=node.version))
    graph.outputs.extend(outputs[1:])
    node.outputs[0].replace_all_uses_with(outputs[0])
    graph.remove(node, safe=True)
