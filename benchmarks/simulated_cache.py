"""KV caches that PyTorch simulates with the operators' reference functions, which `validate` compares engines with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexport.export.graph.graphs import merge_attributes
from kvexport.export.graph.tracer import layer_attributes
from kvexport.export.hooks.attention import PassThroughCache, attending
from kvexport.ops.layer_state import layer_merge_cache, layer_vote_attention
from kvexport.plan.cache import LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.fields import Recipe


class SimulatedCache:
    """The caches of a model that reads one text in chunks. Layers merge after each chunk."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that are stored for new keys and values [1, H, T, D] of tokens at `self.position` [1, T]."""
        return key, value

    def end_chunk(self, layer: int, merged: bool) -> None:
        """Change the state of a layer after a chunk. `merged` tells whether the layer has merged."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        """Compute attention over the state of the layer; see `kvexport.export.hooks.attention`."""
        layer: int = options["layer"]
        state = self.state[layer]
        output, *self.state[layer] = layer_vote_attention(
            *(query, *self.append(key, value), self.position, torch.tensor([[key.shape[2]]])),
            *(*state[:5], None, *state[5:]),  # type: ignore[arg-type]
            attributes=self.attributes[layer],
            capacity=self.capacity[layer],
        )
        return output

    def mask(self, mask_function: Any) -> Any:
        """Return None: VoteAttention masks by itself."""
        return None

    @torch.no_grad()
    def logits(self, model: Any, ids: Sequence[int], recipe: Recipe, geometry: Sequence[LayerGeometry]) -> Tensor:
        """Return the logits [tokens, vocabulary] of every token of a text, read in the recipe's chunks."""
        plan, chunk = plan_cache(recipe, geometry), recipe.export.prefill_chunk
        self.method = recipe.cache.build_method()
        self.attributes = [
            layer_attributes(self.method, layer, cache.value_prefix)
            for layer, cache in zip(geometry, plan.caches, strict=True)
        ]
        self.capacity = [cache.capacity for cache in plan.caches]
        self.state = [
            [torch.from_numpy(np.zeros(shape, x.dtypes()[name])) for name, shape in x.shapes(1).items()]
            for x in plan.caches
        ]
        rows = []
        for first in range(0, len(ids), chunk):
            self.position = torch.arange(first, min(first + chunk, len(ids)))[None]
            tokens = torch.tensor([ids[first : first + chunk]])
            with attending(self):
                arguments = PassThroughCache().as_arguments(model)
                result = model(input_ids=tokens, position_ids=self.position, **arguments)
            rows.append(result.logits[0])
            for i, layer in enumerate(plan.caches):
                votes = self.state[i][2]
                heads = zip(layer.head_slots, layer.budget, strict=True)
                merges = layer.merges and any(int((votes[:, s] > 0).sum()) > budget for s, budget in heads)
                if merges:
                    attributes = merge_attributes(layer, self.method)
                    merged = layer_merge_cache(*self.state[i], attributes=attributes, capacity=layer.capacity)
                    self.state[i] = list(merged)
                self.end_chunk(i, merges)
        return torch.cat(rows)


def kl(full: Tensor, other: Tensor) -> float:
    """Return the mean KL of logits [tokens, vocabulary] over the second half of a text, in nats."""
    half = len(full) // 2
    p, q = (torch.log_softmax(x[half:].double(), -1) for x in (full, other))
    return float((p.exp() * (p - q)).sum(-1).mean())
