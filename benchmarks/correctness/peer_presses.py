"""Comparison of the positions that kvpress's presses keep with kvexport's, on the same model and prompts.

A press compresses once, after the prompt. Here a hook on the attention layers of transformers' own model calls each
press with the arguments that kvpress's own hook would pass. The press gets positions as values, so that its own code
tells which it keeps. (kvpress's hook reads an argument that attention layers of transformers 5 do not get.) kvexport's
methods run as they would be deployed: with the recipe's cache plan and both operators, chunk by chunk
(`kvexport.validate.reference`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.correctness.peer_caches import jaccard
from kvexport.engine.lanes import Lanes
from kvexport.export.build import read_model
from kvexport.export.hooks.attention import cache_name
from kvexport.methods.primitives.select import mean_per_observation
from kvexport.methods.slots import Slots
from kvexport.ops.layer_state import split_state
from kvexport.plan.cache import CachePlan
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.validate.reference import TorchReference

BUDGETS = (128, 256)
WINDOW, POOL = 64, 5
ONE_CHUNK = "export.prefill_chunk={length}"
BARE = ("cache.sinks=0", "cache.recent=0", ONE_CHUNK)
SNAPKV = ("cache.sinks=0", f"cache.recent={WINDOW}", ONE_CHUNK)


@dataclass(frozen=True)
class Case:
    """The setting of one comparison of a method with a press of kvpress."""

    method: str  # method of kvexport
    press: Callable[[SimpleNamespace, float], Any]  # makes the press from kvpress's classes and a compression ratio
    settings: tuple[str, ...] = ()  # changes of the recipe tiny-base
    # Difference of the two rules. "" means that the rules are equal, and then all kept positions must be.
    difference: str = ""
    their_settings: str = ""  # settings of the press, for the result


def _streaming(code: SimpleNamespace, ratio: float) -> Any:
    return code.StreamingLLMPress(ratio, n_sink=4)


def _snapkv(code: SimpleNamespace, ratio: float) -> Any:
    return code.SnapKVPress(ratio, window_size=WINDOW, kernel_size=POOL)


def _observed(code: SimpleNamespace, ratio: float) -> Any:
    return code.ObservedAttentionPress(ratio)


def _accumulated(code: SimpleNamespace, ratio: float) -> Any:
    """Return ObservedAttentionPress with its mean over observations turned back into a sum."""

    class Accumulated(code.ObservedAttentionPress):  # type: ignore[name-defined,misc]
        def score(
            self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Tensor, kwargs: Any
        ) -> Tensor:
            mean: Tensor = super().score(module, hidden_states, keys, values, attentions, kwargs)
            return mean * torch.arange(mean.shape[-1], 0, -1)

    return Accumulated(ratio)


CASES = [
    Case("streaming", _streaming, ("cache.sinks=4", ONE_CHUNK)),
    Case("streaming", _streaming, ("cache.sinks=4",)),
    Case("snapkv", _snapkv, SNAPKV),
    Case("snapkv", _snapkv, (*SNAPKV, "cache.sinks=4"), "4 sinks are protected, and count as zero in the pool"),
    Case(
        "snapkv",
        _snapkv,
        SNAPKV[:2],
        "in chunks of 32: the last queries of every chunk observe, not only the prompt's last 64",
    ),
    Case("snapkv", _snapkv, (*SNAPKV[:2], "export.prefill_chunk=256"), "in chunks of 256, likewise"),
    Case("snapkv", _snapkv, (), "tiny-base: chunks of 32, 4 sinks, half of the budget recent"),
    Case("h2o", _accumulated, BARE, their_settings="times the number of observations"),
    Case("ballot", _observed, BARE, their_settings="against ballot's selector, the mean per observation"),
    Case(
        "h2o", _observed, BARE, "theirs is the mean over the queries that see a token, ours (and the paper's) the sum"
    ),
    Case(
        "h2o",
        _accumulated,
        BARE[:2],
        "in chunks of 32: what has left is not attended to again",
        "times the number of observations",
    ),
    Case(
        "h2o",
        _accumulated,
        (*BARE[:1], ONE_CHUNK),
        "half of the budget is recent, as in the paper",
        "times the number of observations",
    ),
    Case("h2o", _observed, (), "tiny-base: chunks of 32, 4 sinks, half of the budget recent, sums"),
]


class _ReferenceBackend:
    """A `LaneState` of one lane over the PyTorch reference."""

    def __init__(self, reference: TorchReference, plan: CachePlan) -> None:
        self.reference, self.plan = reference, plan
        self.clear(0, 1)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        self.state = {
            name: np.zeros(layer.shapes(1)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in self.plan.state_names()
        }
        self.length = np.zeros((1, 1), dtype=np.int64)

    def decode(self, input_ids: Any, query_length: Any, first: int = 0) -> Any:
        feed = {"input_ids": input_ids, "query_length": query_length, "past_length": self.length, **self.state}
        present = self.reference.decode(feed)
        self.length = present["present_length"]
        self._take(present)
        return present["logits"]

    def merge(self, first: int, last: int) -> None:
        self._take(self.reference.merge(self.state))

    def _take(self, present: Any) -> None:
        for name, array in present.items():
            if name.startswith("present."):
                self.state[name.replace("present.", "past_key_values.")] = array

    def layer(self, i: int) -> list[Tensor]:
        """Return the state of a layer, whose KV heads have one budget, as [1, H, C, ...]."""
        layer = self.plan.caches[i]
        state = [torch.from_numpy(self.state[tensor.past(i)]) for tensor in layer.state]
        return list(split_state(state, layer.state, layer.capacity, together=True)[0])


def our_positions(recipe: Recipe, prompts: list[list[int]]) -> list[Tensor]:
    """Return for each prompt the positions [layers, H, budget] that kvexport keeps, ascending."""
    shape = read_model(recipe)
    assert shape.checkpoint is not None
    reference = TorchReference(shape.checkpoint, shape.plan, shape.geometry, recipe.cache.build_method(), recipe)
    backend = _ReferenceBackend(reference, shape.plan)
    chunk = recipe.export.prefill_chunk
    lanes = Lanes(backend, shape.plan, 1, prefill_chunk=chunk, merge_every=recipe.cache.merge_every)
    kept = []
    for ids in prompts:
        lanes.clear()
        if (
            recipe.cache.method == "ballot"
        ):  # after a merge, positions do not tell which slots were kept, so the selector runs alone
            backend.decode(np.array([ids]), np.array([[len(ids)]]))
            kept.append(
                torch.stack([_selected(backend.layer(i), layer.budget[0]) for i, layer in enumerate(shape.plan.caches)])
            )
        else:
            lanes.prefill([np.array(ids)])
            kept.append(
                torch.stack([backend.layer(i)[4][0, :, : layer.budget[0]] for i, layer in enumerate(shape.plan.caches)])
            )
    return kept


def _selected(state: list[Tensor], budget: int) -> Tensor:
    """Return the positions [H, budget] that ballot would not evict."""
    slots = Slots(*state, now=state[4].amax(-1, keepdim=True))
    used = state[2] > 0
    order = torch.where(used, mean_per_observation(slots), -torch.inf).sort(dim=-1, stable=True).indices
    return state[4].gather(-1, order[..., -budget:]).sort(-1).values[0]


@dataclass
class _Hook:
    """A hook that asks a press, layer by layer, which positions it keeps."""

    press: Any
    kept: list[Tensor] = field(default_factory=list)

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]
        position = torch.arange(layer.keys.shape[2]).expand(layer.keys.shape[:3])
        values = position[..., None].expand_as(layer.keys)
        _, kept = self.press.compress(module, kwargs["hidden_states"], layer.keys, values, output[1], kwargs)
        self.kept.append(kept[0, :, :, 0].sort(-1).values)


@torch.no_grad()
def their_positions(model: Any, press: Any, prompts: list[list[int]]) -> list[Tensor]:
    """Return for each prompt the positions [layers, H, budget] that a press keeps, ascending."""
    kept = []
    for ids in prompts:
        hook = _Hook(press)
        handles = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
        try:
            model(torch.tensor([ids]), **{cache_name(model): DynamicCache()})
        finally:
            for handle in handles:
                handle.remove()
        kept.append(torch.stack(hook.kept))
    return kept


def compare(code: SimpleNamespace, checkpoint: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return a row for each case and budget.

    It has the Jaccard index of kept positions over prompts, layers and heads, and by layer and head.
    """
    length = len(prompts[0])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    rows = []
    for case in CASES:
        for budget in BUDGETS:
            settings = [s.format(length=length) for s in case.settings]
            recipe = load_recipe(
                "tiny-base", [f"cache.method={case.method}", f"cache.budget={budget}", *settings]
            ).recipe
            press = case.press(code, 1 - budget / length)
            theirs = their_positions(model, press, prompts)
            assert theirs[0].shape[-1] == budget, (
                f"{type(press).__name__} keeps {theirs[0].shape[-1]} slots, not {budget}"
            )
            index = torch.stack([jaccard(a, b) for a, b in zip(our_positions(recipe, prompts), theirs, strict=True)])
            rows.append(
                {
                    "ours": case.method,
                    "settings": [s for s in settings if s],
                    "theirs": type(press).__bases__[0].__name__ if case.press is _accumulated else type(press).__name__,
                    "their_settings": case.their_settings,
                    "budget": budget,
                    "difference": case.difference,
                    "jaccard_mean": float(index.mean()),
                    "jaccard_least": float(index.min()),
                    "by_layer_and_head": index.mean(0).tolist(),
                    "holds": bool(case.difference or index.min() == 1.0),
                }
            )
    return rows
