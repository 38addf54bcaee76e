"""The PyTorch reference: the Hugging Face model, run eagerly with kvexport's operators as its attention and cache."""

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvexport.export.graph.graphs import merge_attributes
from kvexport.export.graph.layers import layer_list
from kvexport.export.graph.tracer import OFFSET, CachedAttention, layer_attributes, used_slots
from kvexport.export.hooks.attention import IMPLEMENTATION, ImageRows, TokenLogits, attending, output_projection
from kvexport.export.hooks.recurrence import RecurrentCache, recurring
from kvexport.export.model.hf_model import fix_rotary_frequencies
from kvexport.export.model.tensors import Checkpoint
from kvexport.export.vision import features_of, patches_as_products
from kvexport.methods.base import Method
from kvexport.ops.layer_state import ImageLanes, layer_merge_cache, layer_vote_attention
from kvexport.plan.cache import CachePlan, LayerGeometry, resized
from kvexport.quiet import quiet_exporter
from kvexport.schema.state import STATE, STATE_NAMES
from kvexport.validate.float64 import as_ever, in_float64
from kvexport.validate.slots import slots_for
from kvexport.validate.weights import load_model

Arrays = dict[str, NDArray[Any]]
State = tuple[Tensor, ...]  # the state tensors of one cache, in the order of `LayerCache.state`
VOTES = STATE_NAMES.index("votes")


class _Eager(CachedAttention):
    def __init__(self, past: list[State], *options: Any) -> None:
        super().__init__(*options)
        self.past = past

    def append(self, cache: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        own, extra = self.past[cache][: len(STATE)], self.past[cache][len(STATE) :]
        inputs: Any = (query, key, value, self.position, self.query_length, *own, sinks, *extra)
        named: Any = {"attributes": self.attributes[cache], "capacity": self.capacity[cache]}
        output: Tensor
        output, *self.present[cache] = layer_vote_attention(*inputs, **named)
        return output


class TorchReference:
    """PyTorch versions of the exported decoder and merge graphs, with the ONNX graphs' input and output names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: CachePlan,
        geometry: list[LayerGeometry],
        method: Method,
        recipe: Any,
        row_size: int = 0,  # numbers of a row of an image; 0 for a model that reads no images
    ) -> None:
        self.plan, self.method = plan, method
        self._attributes = [
            layer_attributes(method, layer, cache.value_prefix)
            for layer, cache in zip(geometry, plan.caches, strict=True)
        ]
        self._last_logits = recipe.export.logits == "last"
        with quiet_exporter():
            self.model = load_model(checkpoint, recipe, IMPLEMENTATION)
        fix_rotary_frequencies(self.model, recipe.rotary_length)
        self._token_logits, self._images = TokenLogits(self.model), ImageRows(self.model, row_size)
        if plan.rotary_offset:
            patches_as_products(self.model.base_model.visual)  # float64 takes products, and no convolutions
        self._layers = layer_list(self.model)[1]
        for module in self.model.modules():
            if isinstance(getattr(module, "inv_freq", None), Tensor):
                # The model computes its rotary angles in float32; angles computed in float64 would differ.
                module.forward = as_ever(module.forward)

    @torch.no_grad()
    def image_rows(self, arguments: Mapping[str, Tensor]) -> NDArray[Any]:
        rows: NDArray[Any] = features_of(self.model, **arguments).numpy()
        return rows

    @torch.no_grad()
    def decode_in_float64(self, feed: Mapping[str, NDArray[Any]]) -> Arrays:
        with in_float64():
            return self.decode(feed)

    @torch.no_grad()
    def decode(self, feed: Mapping[str, NDArray[Any]], hidden: dict[int, NDArray[Any]] | None = None) -> Arrays:
        """Compute decoder.onnx; `hidden` receives the hidden states at the start of each layer with a cache."""
        ids, query_length, past_length = (
            torch.from_numpy(np.ascontiguousarray(feed[name])) for name in ("input_ids", "query_length", "past_length")
        )
        position = past_length + torch.arange(ids.shape[1])
        caches = enumerate(self.plan.caches)
        capacity = [slots_for(feed[STATE[VOTES].past(i)], cache, ids.shape[1]) for i, cache in caches]
        past = [self._used(feed, i, slots) for i, slots in enumerate(capacity)]
        rotated_by = position
        if self.plan.cache_positions:
            rotated_by = used_slots(past[0][VOTES], self.plan.caches[0].kv_heads) + torch.arange(ids.shape[1])
        images = None
        if "image_lanes" in feed:
            lanes, places = (torch.from_numpy(feed[name]) for name in ("image_lanes", "image_places"))
            images = ImageLanes.of(lanes, places, position)
        eager = _Eager(past, self.plan, self._attributes, position, query_length, images, capacity)
        names = {(x.layer, tensor.name): (x.place, tensor) for x in self.plan.states for tensor in x.state}
        recurrent = {
            place: torch.from_numpy(np.array(feed[tensor.past(name)])) for place, (name, tensor) in names.items()
        }
        past_offset = recurrent.pop(OFFSET, None)
        states = RecurrentCache(self.model.config.model_type, recurrent, query_length, traced=False)
        if past_offset is not None:  # as in the traced decoder
            offsets = torch.from_numpy(feed["image_offsets"])
            added = offsets[:, 3].gather(1, torch.clamp(query_length - 1, min=0))
            states.present[OFFSET] = (past_offset + added).to(past_offset.dtype)
            rotated_by = position + past_offset + offsets[:, :3].transpose(0, 1)
        self._token_logits.query_length = query_length if self._last_logits else None
        if "image_rows" in feed:
            self._images.rows, self._images.places = map(torch.from_numpy, (feed["image_rows"], feed["image_places"]))
        with attending(eager, position), recurring(self.model, states), self._watched(hidden):
            logits = self.model(input_ids=ids, position_ids=rotated_by, **states.as_arguments(self.model)).logits
        present = {}
        for i, state in eager.present.items():
            cache = self.plan.caches[i]
            for tensor, x in zip(cache.state, state, strict=True):
                axis, array = tensor.slot_axis, x.numpy()
                present[tensor.present(i)] = (
                    array if axis is None else resized(array, axis, capacity[i], cache.capacity)
                )
        present |= {tensor.present(name): states.present[place].numpy() for place, (name, tensor) in names.items()}
        return {"logits": logits.float().numpy(), "present_length": (past_length + query_length).numpy(), **present}

    def time_decode(self, lanes: int, tokens: int) -> float:
        filled = {
            name: np.zeros(layer.shapes(lanes)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in self.plan.state_names()
        }
        for i, layer in enumerate(self.plan.caches):
            for slots, budget in zip(layer.head_slots, layer.budget, strict=True):
                used = max(0, min(budget, slots.stop - slots.start - tokens))
                filled[STATE[VOTES].past(i)][:, slots.start : slots.start + used] = 1.0
        lengths = np.full((lanes, 1), tokens, dtype=np.int64)
        ids = np.zeros((lanes, tokens), dtype=np.int64)
        if self.plan.rotary_offset:
            filled["image_offsets"] = np.zeros((lanes, 4, tokens), np.int64)
        begin = time.perf_counter()
        self.decode({"input_ids": ids, "query_length": lengths, "past_length": lengths * 0, **filled})
        return time.perf_counter() - begin

    @torch.no_grad()
    def merge(self, feed: Mapping[str, NDArray[Any]]) -> Arrays:
        present = {}
        for i, layer in enumerate(self.plan.caches):
            if layer.merges:
                state = self._layer(feed, i)
                if any(map(int.__gt__, layer.capacity, layer.budget)):  # else it is never over its budget
                    attributes = merge_attributes(layer, self.method)
                    state = layer_merge_cache(*state, attributes=attributes, capacity=layer.capacity)
                present.update({t.present(i): x.numpy() for t, x in zip(layer.state, state, strict=True)})
        return present

    @contextlib.contextmanager
    def _watched(self, hidden: dict[int, NDArray[Any]] | None) -> Iterator[None]:
        handles = []
        if hidden is not None:
            layers = self._layers
            if self.plan.attention_layers:
                layers = tuple(layers[i] for i in self.plan.attention_layers)
            for i, layer in enumerate(layers):

                def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
                    hidden[i] = (args[0] if args else kwargs["hidden_states"]).numpy()

                handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _used(self, feed: Mapping[str, NDArray[Any]], i: int, capacity: tuple[int, ...]) -> State:
        cache = self.plan.caches[i]
        arrays = ((feed[tensor.past(i)], tensor.slot_axis) for tensor in cache.state)
        cut = (x if axis is None else resized(x, axis, cache.capacity, capacity) for x, axis in arrays)
        return tuple(torch.from_numpy(np.ascontiguousarray(x)) for x in cut)

    def _layer(self, feed: Mapping[str, NDArray[Any]], i: int) -> State:
        return tuple(
            torch.from_numpy(np.ascontiguousarray(feed[tensor.past(i)])) for tensor in self.plan.caches[i].state
        )


@torch.no_grad()
def full_logits(
    checkpoint: Checkpoint,
    recipe: Any,
    tokens: list[NDArray[np.int64]],
    positions: list[list[int]],
    images: Mapping[str, Tensor],
) -> list[dict[int, NDArray[np.float32]]]:
    """Return the logits of the uncompressed model, by its own attention and cache, at positions of each sequence."""
    with quiet_exporter():
        model = _load_attending(checkpoint, recipe)
    picked: list[int] = []

    def pick(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0][:, picked], *arguments[1:])

    output_projection(model).register_forward_pre_hook(pick)
    logits_of: list[dict[int, NDArray[np.float32]]] = []
    for ids, at in zip(tokens, positions, strict=True):
        picked[:] = at
        read = {} if logits_of else dict(images)
        # Some models ask where images are, for rotary positions of rows and columns or for attention within an image.
        kinds = "mm_token_type_ids" if "image_grid_thw" in read else "token_type_ids"
        if read and kinds in inspect.signature(model.forward).parameters:
            read[kinds] = torch.from_numpy(ids == model.config.image_token_id)[None].int()
        rows = model(input_ids=torch.from_numpy(ids)[None], **read).logits[0].float().numpy() if at else []
        logits_of.append(dict(zip(at, rows, strict=True)))
    return logits_of


def _load_attending(checkpoint: Checkpoint, recipe: Any) -> Any:
    if recipe.model.dtype == "float32":
        try:
            return load_model(checkpoint, recipe, "sdpa")
        except ValueError:
            pass
    return load_model(checkpoint, recipe, "eager")
