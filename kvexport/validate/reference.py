"""The PyTorch reference: the Hugging Face model, run eagerly with kvexport's operators as its attention and cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvexport.cache import CachePlan, LayerGeometry, cache_geometry, layer_caches
from kvexport.export.graph.graphs import merge_attributes
from kvexport.export.graph.layers import layer_list
from kvexport.export.graph.tracer import layer_attributes, used_slots
from kvexport.export.hooks.attention import IMPLEMENTATION, TokenLogits, attending, output_projection
from kvexport.export.hooks.recurrence import RecurrentCache, recurring
from kvexport.export.model.checkpoint import Checkpoint
from kvexport.export.model.hf_model import fix_rotary_frequencies
from kvexport.methods.base import Method
from kvexport.ops.merge_cache import merge_cache
from kvexport.ops.ragged import heads_of
from kvexport.ops.vote_attention import VoteAttentionAttributes, read_attention, vote_attention
from kvexport.quiet import quiet_exporter
from kvexport.schema.state import STATE, STATE_NAMES, scales_of
from kvexport.validate.float64 import as_ever, in_float64
from kvexport.validate.slots import resized, slots_for, with_slots
from kvexport.validate.weights import load_model

if TYPE_CHECKING:
    from kvexport.validate.telemetry import Telemetry

Arrays = dict[str, NDArray[Any]]
State = tuple[Tensor, ...]  # the state tensors of one cache, in the order of `LayerCache.state`
VOTES = STATE_NAMES.index("votes")


class _Eager:
    """PyTorch implementation of attention over given KV-cache tensors; `telemetry` receives its inputs."""

    def __init__(
        self,
        method: Method,
        plan: CachePlan,
        geometry: list[LayerGeometry],
        position: Tensor,
        query_length: Tensor,
        past: Mapping[int, State],
        telemetry: Telemetry | None,
    ) -> None:
        self.method, self.plan, self.past = method, plan, past
        self.geometry, self.caches = cache_geometry(geometry, len(past)), layer_caches(geometry, len(past))
        self.position, self.query_length, self.telemetry = position, query_length, telemetry
        self.present: dict[int, tuple[Tensor, ...]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        if options["reads"] is not None:
            return self._read(self.plan.cache_of(options["reads"]), query, options.get("s_aux"))
        layer = self.plan.cache_of(options["layer"])
        caches = self.caches[layer]
        heads = heads_of(query, key, value, options.get("s_aux"), len(caches))
        return torch.cat([self._attend(cache, *inputs) for cache, inputs in zip(caches, heads, strict=True)], 1)

    def _attend(self, cache: int, query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None) -> Tensor:
        if self.telemetry:
            self.telemetry.attended(cache, query, key, value, self.position, self.query_length, sink_logits)
        past = self.past[cache]
        own, extra = past[: len(STATE)], past[len(STATE) :]
        inputs = (query, key, value, self.position, self.query_length, *own, sink_logits, *extra)
        result = vote_attention(
            *inputs,  # type: ignore[arg-type]
            attributes=self._attributes(cache),
        )
        self.present[cache] = result[1:]
        return result[0]

    def _read(self, cache: int, query: Tensor, sink_logits: Tensor | None) -> Tensor:
        """Return the attention of a layer that reads the cache of another layer."""
        state = self.present[cache][: len(STATE) + len(scales_of(self.plan.caches[cache].dtype))]
        attributes = self._attributes(cache)
        return read_attention(query, self.position, self.query_length, state, sink_logits, attributes=attributes)

    def _attributes(self, cache: int) -> VoteAttentionAttributes:
        return layer_attributes(self.method, self.geometry[cache], self.plan.caches[cache].value_prefix)

    def mask(self, mask_function: Any) -> Any:
        return None


class TorchReference:
    """PyTorch versions of the exported decoder and merge graphs, over numpy arrays with the ONNX graphs' names."""

    def __init__(
        self, checkpoint: Checkpoint, plan: CachePlan, geometry: list[LayerGeometry], method: Method, recipe: Any
    ) -> None:
        self.plan, self.geometry, self.method = plan, geometry, method
        self._last_logits = recipe.export.logits == "last"
        with quiet_exporter():
            self.model = load_model(checkpoint, recipe, IMPLEMENTATION)
        fix_rotary_frequencies(self.model, recipe.rotary_length)
        self._token_logits = TokenLogits(self.model)
        self._layers = layer_list(self.model)[1]
        for module in self.model.modules():
            if isinstance(getattr(module, "inv_freq", None), Tensor):
                # The model defines its rotary angles in float32; angles computed in float64 would differ.
                module.forward = as_ever(module.forward)

    @torch.no_grad()
    def decode_in_float64(self, feed: Mapping[str, NDArray[Any]]) -> Arrays:
        """Compute the decoder in PyTorch with every operation in float64."""
        with in_float64():
            return self.decode(feed)

    @torch.no_grad()
    def decode(
        self,
        feed: Mapping[str, NDArray[Any]],
        telemetry: Telemetry | None = None,
        hidden: dict[int, NDArray[Any]] | None = None,
    ) -> Arrays:
        """Compute the decoder in PyTorch, with the inputs and outputs of decoder.onnx.

        Args:
            feed: input_ids [B, T], query_length [B, 1], past_length [B, 1] and past_key_values.*.
            telemetry: Receives the inputs of every layer's attention.
            hidden: If not None, receives the hidden state [B, T, hidden] at the start of every layer, by the number of
                the layer's first cache.

        Returns:
            logits, present_length and present.*.
        """
        ids, query_length, past_length = (
            torch.from_numpy(np.ascontiguousarray(feed[name])) for name in ("input_ids", "query_length", "past_length")
        )
        position = past_length + torch.arange(ids.shape[1])
        past = {i: self._used(feed, i, ids.shape[1]) for i in range(len(self.plan.caches))}
        rotated_by = position
        if self.plan.cache_positions:
            rotated_by = used_slots(past[0][VOTES]) + torch.arange(ids.shape[1])
        eager = _Eager(self.method, self.plan, self.geometry, position, query_length, past, telemetry)
        names = {(x.layer, tensor.name): (x.place, tensor) for x in self.plan.states for tensor in x.state}
        recurrent = {
            place: torch.from_numpy(np.array(feed[tensor.past(name)])) for place, (name, tensor) in names.items()
        }
        states = RecurrentCache(self.model.config.model_type, recurrent, query_length, traced=False)
        self._token_logits.query_length = query_length if self._last_logits else None
        with attending(eager), recurring(self.model, states), self._watched(hidden):
            logits = self.model(input_ids=ids, position_ids=rotated_by, **states.as_arguments(self.model)).logits
        present = {
            tensor.present(i): x.numpy()
            for i, state in eager.present.items()
            for tensor, x in zip(self.plan.caches[i].state, state, strict=True)
        }
        present = with_slots(self.plan, present)
        present |= {tensor.present(name): states.present[place].numpy() for place, (name, tensor) in names.items()}
        return {"logits": logits.float().numpy(), "present_length": (past_length + query_length).numpy(), **present}

    def time_decode(self, lanes: int, tokens: int) -> float:
        """Return the seconds of one PyTorch decoder call with `lanes` * `tokens` tokens and filled KV caches."""
        filled = {
            name: np.zeros(layer.shapes(lanes)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in self.plan.state_names()
        }
        for i, layer in enumerate(self.plan.caches):
            filled[STATE[VOTES].past(i)][..., : max(0, min(layer.budget, layer.capacity - tokens))] = 1.0
        lengths = np.full((lanes, 1), tokens, dtype=np.int64)
        ids = np.zeros((lanes, tokens), dtype=np.int64)
        begin = time.perf_counter()
        self.decode({"input_ids": ids, "query_length": lengths, "past_length": lengths * 0, **filled})
        return time.perf_counter() - begin

    @torch.no_grad()
    def merge(self, feed: Mapping[str, NDArray[Any]]) -> Arrays:
        """Compute the merge of KV caches in PyTorch, with the inputs and outputs of merge.onnx."""
        present = {}
        for i, layer in enumerate(self.plan.caches):
            if layer.merges:
                state = self._layer(feed, i)
                if state[VOTES].shape[-1] > layer.budget:  # else it never exceeds its budget
                    state = merge_cache(*state, attributes=merge_attributes(layer, self.method))
                present.update({t.present(i): x.numpy() for t, x in zip(layer.state, state, strict=True)})
        return present

    @contextlib.contextmanager
    def _watched(self, hidden: dict[int, NDArray[Any]] | None) -> Iterator[None]:
        handles = []
        if hidden is not None:
            first = [caches[0] for caches in layer_caches(self.geometry, len(self.plan.caches))]
            layers = self._layers
            if self.plan.attention_layers:
                layers = tuple(layers[i] for i in self.plan.attention_layers)
            for i, layer in zip(first, layers, strict=True):

                def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
                    hidden[i] = (args[0] if args else kwargs["hidden_states"]).numpy()

                handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _used(self, feed: Mapping[str, NDArray[Any]], i: int, tokens: int) -> State:
        """Return the state tensors of cache number i, with the slots that a call of `tokens` tokens needs."""
        slots = slots_for(feed[STATE[VOTES].past(i)], tokens)
        arrays = ((feed[tensor.past(i)], tensor.slot_axis) for tensor in self.plan.caches[i].state)
        cut = (x if axis is None else resized(x, axis, slots) for x, axis in arrays)
        return tuple(torch.from_numpy(np.ascontiguousarray(x)) for x in cut)

    def _layer(self, feed: Mapping[str, NDArray[Any]], i: int) -> State:
        return tuple(
            torch.from_numpy(np.ascontiguousarray(feed[tensor.past(i)])) for tensor in self.plan.caches[i].state
        )


@torch.no_grad()
def full_logits(
    checkpoint: Checkpoint, recipe: Any, tokens: list[NDArray[np.int64]], positions: list[list[int]]
) -> list[dict[int, NDArray[np.float32]]]:
    """Return the logits [vocabulary] of the uncompressed Hugging Face model at the given positions of each sequence.

    The model runs with its own attention and cache.
    """
    with quiet_exporter():
        model = _load_attending(checkpoint, recipe)
    picked: list[int] = []

    def pick(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0][:, picked], *arguments[1:])

    output_projection(model).register_forward_pre_hook(pick)
    logits_of = []
    for ids, at in zip(tokens, positions, strict=True):
        picked[:] = at
        rows = model(input_ids=torch.from_numpy(ids)[None]).logits[0].float().numpy() if at else []
        logits_of.append(dict(zip(at, rows, strict=True)))
    return logits_of


def _load_attending(checkpoint: Checkpoint, recipe: Any) -> Any:
    """Load the Hugging Face model with an attention implementation of transformers: sdpa in float32, if supported."""
    if recipe.model.dtype == "float32":
        try:
            return load_model(checkpoint, recipe, "sdpa")
        except ValueError:
            pass
    return load_model(checkpoint, recipe, "eager")
