"""How far a compressed KV cache's predictions are from the full cache's on one text, as builds report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvexport.calibrate.compressed import compressed_attention
from kvexport.calibrate.head_costs import FullAttention, sized
from kvexport.evaluate.language import Ids
from kvexport.export.model.layerwise import LayerwiseDecoder
from kvexport.export.model.tensors import ModelShape
from kvexport.methods.base import Method
from kvexport.plan.cache import CachePlan, LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.divergence import DROPPING, Divergence
from kvexport.recipe.fields import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn


def divergence(recipe: Recipe, shape: ModelShape, ids: Ids, slots: int, device: str) -> Divergence:
    """Return how far the recipe's cache, and one that drops, are from the full one: KL over half a text."""
    import torch

    base = sized(recipe, len(ids), slots).model_dump(mode="json")
    cache = {**base["cache"], "allocation": recipe.cache.allocation.model_dump(mode="json")}
    dropping = {**cache, "method": DROPPING, "parameters": {}, "allocation": {"kind": "uniform"}}
    recipes = [Recipe.model_validate({**base, "cache": x}) for x in (cache, dropping)]
    kept = list(range(len(ids) // 2, len(ids) - 1, 4))
    decoder = LayerwiseDecoder(shape.checkpoint, recipe, torch.device(device))
    chunk = base["export"]["prefill_chunk"]
    full = decoder.logits(ids, kept, FullAttention(shape.geometry, recipe.cache.build_method())).log_softmax(-1)
    results = []
    for own in recipes:
        plan = plan_cache(own, shape.geometry)
        attention = CompressedAttention(plan, shape.geometry, own.cache.build_method(), chunk)
        logs = decoder.logits(ids, kept, attention).log_softmax(-1)
        results.append(float(f"{float((torch.exp(full) * (full - logs)).sum(-1).mean()):.4g}"))
    return Divergence(slots, len(ids), *results)


class CompressedAttention:
    def __init__(self, plan: CachePlan, geometry: Sequence[LayerGeometry], method: Method, chunk: int) -> None:
        self.plan, self.geometry, self.method, self.chunk = plan, geometry, method, chunk

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        import torch

        layer, cache = self.geometry[options["layer"]], self.plan.caches[options["layer"]]
        group, sinks = layer.query_heads // layer.kv_heads, options.get("s_aux")
        one = replace(layer, query_heads=group, kv_heads=1)
        outputs = []
        for head in range(layer.kv_heads):
            at, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
            own = replace(cache, budget=cache.budget[at], capacity=cache.capacity[at], recent=cache.recent[at])
            inputs = query[:, queries], key[:, at], value[:, at]
            own_sinks = None if sinks is None else sinks[queries]
            outputs.append(compressed_attention(own, one, self.method, inputs, self.chunk, own_sinks))
        return torch.cat(outputs, 1)
