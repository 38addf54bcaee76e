"""The attention hook: one attention function, mask function and cache object that serve every decoder of transformers.

transformers calls a registered function for every attention layer, with everything that attention needs (query, key,
value, scale, window, softcap, sink logits). The registered function calls the `Attending` object of the current
context: the probe that examines a model without weights, the tracer, or the PyTorch reference.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from kvexport.errors import UsageError
from kvexport.export.hooks.indexer import without_picks
from kvexport.export.hooks.latent import absorbed_query, expanded_output, is_latent, latent_key, latest_expanded

IMPLEMENTATION = "kvexport"


class Attending(Protocol):
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the attention output [B, Hq, T, Dv] of one layer.

        query is [B, Hq, T, D], and the new tokens' key and value are [B, H, T, D] and [B, H, T, Dv] with H KV heads.
        `options` has the other arguments from transformers, such as the scale; `layer`, the number of the layer; and
        `reads`, the number of another layer whose keys and values are read, or None.
        """
        ...


class PositionMask:
    """An attention mask as a function of positions, in place of the tensor that a model expects."""

    ndim = 0  # Falcon asks

    def __init__(self, visible: Any) -> None:
        self.visible = visible

    def __getitem__(self, index: Any) -> PositionMask:
        """Return the attention mask itself if `index` selects all queries, as models of Gemma 4 request it."""
        if any(part not in (slice(None), slice(0, None)) for part in index):
            raise TypeError(f"{type(self).__name__} has no part {index}")
        return self

    def to(self, dtype: torch.dtype) -> PositionMask:
        return self


_current: ContextVar[Attending] = ContextVar("attending")
_position: ContextVar[Tensor | None] = ContextVar("position")  # [B, T]; None: positions count from 0
_cached: ContextVar[dict[int, tuple[Tensor, Tensor]]] = ContextVar("cached")  # by layer, what `update` received
_attended: ContextVar[set[int]] = ContextVar("attended")  # layers that have attended to their own keys


@contextlib.contextmanager
def attending(attention: Attending, position: Tensor | None = None) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Within this context, let `attention` compute the attention of tokens at `position` [B, T], or from 0 on."""
    token, cached, attended = _current.set(attention), _cached.set({}), _attended.set(set())
    placed = _position.set(position)
    try:
        yield _cached.get()
    finally:
        _position.reset(placed)
        _current.reset(token)
        _cached.reset(cached)
        _attended.reset(attended)


def cache_name(model: Any) -> str:
    """Return the name of the argument by which a model of transformers takes its KV cache.

    transformers 5.24 renamed `past_key_values` to `cache`, and warns of the old name, which 5.40 will not take. Models
    without attention call it `cache_params`.
    """
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")


class _NoLayers(list[Any]):
    """No layers; Qwen 4 Exp asks a cache's layer for the positions of earlier tokens, for its indexers."""

    def __getitem__(self, index: Any) -> Any:
        return SimpleNamespace(indexer_position_ids=None)


class PassThroughCache(Cache):
    """A cache that returns only the new keys and values, because keys and values of earlier tokens are graph inputs."""

    def __init__(self, model_type: str = "the model") -> None:
        super().__init__(layers=_NoLayers())
        self.model_type = model_type

    def as_arguments(self, model: Any) -> dict[str, Any]:
        return {cache_name(model): self, "use_cache": True}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values; for a layer with latent attention, the latent vectors and rotated keys."""
        _cached.get()[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        if layer_idx is not None:
            raise UsageError(
                f"layer {layer_idx} of {self.model_type} computes positions from the length of its cache, not from "
                "position_ids; it cannot be exported"
            )
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _no_attention(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"{self.model_type} has layers with a recurrent state (state-space or linear attention), which this "
            "command does not support"
        )

    has_previous_state = get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = (
        _no_attention
    )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    output = attend(module, query, key, value, {**options, "attention_mask": attention_mask}).transpose(1, 2)
    # The output is contiguous, as that of transformers' own functions is: some models take views of it.
    return output.contiguous(), None


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    options = without_picks(options.pop("attention_mask"), options)
    options["layer"], options["reads"] = _layers_of(module, latest_expanded() if is_latent(module) else key)
    if is_latent(module):
        if options.get("scaling") is None:
            options["scaling"] = key.shape[3] ** -0.5
        latent, rotated = _cached.get()[options["layer"] if options["reads"] is None else options["reads"]]
        absorbed = absorbed_query(module, query), latent_key(latent, rotated), latent
        return expanded_output(module, _current.get().attend(module, *absorbed, options))
    return _current.get().attend(module, query, key, value, options)


def token_positions(key: Tensor) -> Tensor:
    """Return the positions [B, T] of the tokens whose keys are `key` [B, H, T, D]."""
    position = _position.get()
    return torch.arange(key.shape[2], device=key.device)[None] if position is None else position


def _layers_of(module: nn.Module, key: Tensor) -> tuple[int | None, int | None]:
    """Return the number of the attending layer, and of another layer whose keys it reads; None for no such layer.

    Layers that share one attention module (Zamba 2) pass their number only to `Cache.update`, so the layer is found by
    the tensor `key` that this method returned. Layers that share keys and values (Gemma 3n, Gemma 4) attend to the keys
    that another layer passed to `Cache.update`, after that layer has attended to them.
    """
    number: int | None = getattr(module, "layer_idx", None)
    source = next((layer for layer, (own, _) in _cached.get().items() if own is key), None)
    if source is None:
        return number, None
    if source in _attended.get() and number not in (None, source):
        return number, source
    _attended.get().add(source)
    return source, None


def _mask(*args: Any, mask_function: Any = None, **options: Any) -> PositionMask | None:
    return None if mask_function is None else PositionMask(mask_function)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def output_projection(model: Any) -> Any:
    """Return the module that projects hidden states to logits: of the whole model, or of a decoder inside it."""
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        if head is not None:
            return head
    raise UsageError(f"{model.config.model_type} has no projection to logits that transformers names")


class ImageRows:
    """A hook that replaces the embeddings of some tokens by embeddings that an image encoder computed.

    A vector of an image may be longer than an embedding: its further elements are added to the outputs of the first
    layers (deepstack).
    """

    def __init__(self, model: Any, size: int) -> None:
        self.rows: Tensor  # [rows, size]; row 0 is zeros, and replaces nothing
        # [B, T]: for each token the row that replaces its embedding; 0 for none. None replaces no embedding.
        self.places: Tensor | None = None
        self.hidden = model.config.get_text_config().hidden_size
        self.size = size
        self.deep = max(0, size // self.hidden - 1)  # layers that add some numbers of a row
        model.get_input_embeddings().register_forward_hook(self._put)
        for i, layer in enumerate(model.base_model.language_model.layers[: self.deep] if self.deep else ()):
            layer.register_forward_hook(partial(self._add, i + 1))

    def _of_tokens(self, part: int, like: Tensor) -> Tensor:
        rows = self.rows[:, part * self.hidden : (part + 1) * self.hidden]
        return rows.to(like.dtype)[self.places]

    def _put(self, module: nn.Module, arguments: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        if self.places is None:
            return embedded
        return torch.where(self.places[..., None] > 0, self._of_tokens(0, embedded), embedded)

    def _add(self, part: int, module: nn.Module, arguments: tuple[Tensor, ...], hidden: Tensor) -> Tensor:
        return hidden if self.places is None else hidden + self._of_tokens(part, hidden)


class TokenLogits:
    """A hook on the output projection: only each sequence's last token that is not padding gets logits."""

    def __init__(self, model: Any) -> None:
        self.query_length: Tensor | None = None
        output_projection(model).register_forward_pre_hook(self._pick)

    def _pick(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.query_length is None:
            return arguments
        hidden = arguments[0]  # [B, T, hidden]
        last = torch.clamp(self.query_length - 1, min=0)[:, :, None].expand(hidden.shape[0], 1, hidden.shape[2])
        return (hidden.gather(1, last), *arguments[1:])
