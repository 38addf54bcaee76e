"""A second-order estimate of the loss that evictions from each KV head's cache cause.

A text is read once with the full KV cache. For every KV head, the same queries also read small caches; the head's
output then differs by a vector d from that with the full cache. To second order, the KL divergence between the two
predictions is half the square of the product g d. Here g is the gradient of a random projection of the logits, chosen
so that the mean square of g is the Fisher information. One forward pass and a few backward passes thus measure all
heads and several budgets. The estimate neglects interactions between the differences d of two tokens or two heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvexport.calibrate.compressed import compressed_attention
from kvexport.errors import UsageError
from kvexport.evaluate.language import Ids
from kvexport.export.graph.tracer import layer_attributes
from kvexport.export.model.layerwise import LayerwiseDecoder
from kvexport.export.model.tensors import ModelShape
from kvexport.methods.base import Method
from kvexport.ops.vote_attention import read_attention
from kvexport.plan.cache import LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.fields import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

PROBES = 2  # random projections of the logits
CHUNKS = 32  # least number of chunks in which a text is read, so that each merge evicts few tokens
EQUAL = "--set cache.allocation.kind=uniform, which gives all KV heads equal budgets"
FORWARD, BACKWARD = 1, 4  # progress steps of a layer's forward and backward pass, about in the ratio of their times


class HeadCosts:
    def __init__(self, recipe: Recipe, shape: ModelShape, device: str = "cpu") -> None:
        import torch

        if len(heads := {layer.kv_heads for layer in shape.geometry}) > 1:
            problem = f"layers have different numbers of KV heads ({', '.join(map(str, sorted(heads)))})"
            raise UsageError(problem, EQUAL)
        self._recipe, self._method, self._geometry = recipe, recipe.cache.build_method(), shape.geometry
        self._decoder = LayerwiseDecoder(shape.checkpoint, recipe, torch.device(device))

    @property
    def units(self) -> int:
        return len(self._geometry) * (FORWARD + BACKWARD)

    def of_text(
        self,
        ids: Ids,
        counted: Sequence[int],
        budgets: Callable[[int], Sequence[int]],
        advance: Callable[[int], None] = lambda _: None,
    ) -> NDArray[np.float64]:
        """Return the loss [layers, heads, budgets] by each KV head's evictions, in nats per evaluated position.

        `budgets` is a function: from the number of tokens that a KV head sees (the text, or a shorter sliding window)
        to the numbers of cache slots to measure.
        """
        geometry, full = self._geometry, FullAttention(self._geometry, self._method)
        slots = [budgets(min(len(ids), layer.sliding_window or len(ids))) for layer in geometry]
        recipes = {n: sized(self._recipe, len(ids), n) for n in sorted({n for own in slots for n in own})}
        plans = {n: plan_cache(recipe, geometry) for n, recipe in recipes.items()}
        chunk = recipes[slots[0][0]].export.prefill_chunk
        passes = self._decoder.passes(ids, full, lambda: advance(FORWARD))
        gradients = passes.last_gradients(counted, full, _fisher_directions)
        costs = np.zeros((len(geometry), geometry[0].kv_heads, len(slots[0])))
        for i in reversed(range(len(geometry))):
            inner, gradients = passes.layer_gradients(i, full, lambda: full.last[-1], gradients)
            *inputs, output = (x.detach() for x in full.last)
            for p, n in enumerate(slots[i]):
                cache = plans[n].caches[i]
                d = compressed_attention(cache, geometry[i], self._method, inputs, chunk, full.sink_logits) - output
                for gradient in inner:
                    change = (gradient * d).reshape(costs.shape[1], -1, *d.shape[2:]).sum((1, 3))  # [H, T]
                    costs[i, :, p] += 0.5 * change.square().sum(1).double().cpu().numpy() / PROBES / len(counted)
            advance(BACKWARD)
        return costs


def sized(recipe: Recipe, length: int, slots: int) -> Recipe:
    """Return a copy of a recipe in float32 with `slots` slots for every KV head and room for `length` tokens."""
    sections = recipe.model_dump(mode="json")
    chunk = max(1, min(recipe.export.prefill_chunk, length // CHUNKS))
    sections["model"]["dtype"] = "float32"
    sections["cache"] |= {"dtype": "model", "budget": slots, "slack": None, "allocation": {"kind": "uniform"}}
    sections["limits"]["max_length"] = length
    sections["export"] |= {"prefill_chunk": chunk, "logits": "all"}
    return Recipe.model_validate(sections)


def _fisher_directions(logits: Tensor) -> Iterator[Tensor]:
    """Yield gradients of random projections of the logits whose mean square is the Fisher information."""
    import torch

    probability, rng = torch.softmax(logits, -1), torch.Generator().manual_seed(0)
    root = probability.sqrt()
    for _ in range(PROBES):
        # Drawn on the CPU, so that a GPU measures with the same projections.
        signs = torch.randint(0, 2, probability.shape, generator=rng, dtype=torch.int8, device="cpu").mul_(2).sub_(1)
        drawn = root * signs.to(root.device)
        yield drawn.addcmul_(probability, (root * drawn).sum(-1, keepdim=True), value=-1)


class FullAttention:
    """Full attention that stores the query, key, value and output of the layer that ran last."""

    def __init__(self, geometry: Sequence[LayerGeometry], method: Method) -> None:
        self.geometry, self.method = geometry, method
        self.last: tuple[Tensor, Tensor, Tensor, Tensor]
        self.sink_logits: Tensor | None = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Return causal attention [1, Hq, T, Dv] over the layer's window, and keep the query, key and value."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        layer, sinks = self.geometry[options["layer"]], options.get("s_aux")
        if layer.sliding_window or layer.softcap or sinks is not None:
            position = torch.arange(query.shape[2], device=query.device)[None]
            votes = key.new_ones(key.shape[:3])
            state = key, value, votes, votes, position.expand(key.shape[:3])
            attributes = layer_attributes(self.method, layer)
            lengths = torch.tensor([[query.shape[2]]], device=query.device)
            output = read_attention(query, position, lengths, state, sinks, attributes=attributes)
        else:
            output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=layer.scale, enable_gqa=True)
        self.last, self.sink_logits = (query, key, value, output), None if sinks is None else sinks.detach()
        return output
