"""A forward pass without weights that finds the attention and the recurrent states of a decoder's layers.

A model that kvexport cannot export is refused with an error that names the reason.
"""

import inspect
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvexport.errors import UsageError
from kvexport.export.hooks.attention import PositionMask, attending
from kvexport.export.hooks.experts import expert_modules
from kvexport.export.hooks.latent import is_latent
from kvexport.export.hooks.recurrence import RecurrentCache, recurring
from kvexport.export.model.config import first_line_of
from kvexport.export.model.hf_model import is_composite
from kvexport.plan.cache import LayerGeometry, LayerStates

PROBE_POSITIONS = (1 << 20, (1 << 20) + 1, (1 << 20) + 37)
PROBE_SPAN = 1 << 18
SHARED = (
    *("sliding_window", "softcap", "scale", "sink_logits", "kv_heads", "key_size", "value_size", "most_picked"),
    "chunk",
)
"""What has to be equal in two layers of which one reads the cache of the other."""
STATELESS = ("moe", "mlp")  # config.json's names of layers that compute each token by itself (Nemotron-H)


class _Probe:
    """A recorder of how each layer calls its attention, in a forward pass on fake tensors (tensors without data)."""

    def __init__(self, model: Any) -> None:
        self.model_type, self.config = model.config.model_type, model.config.get_text_config()
        self.cache = RecurrentCache(self.model_type)
        self.cached: Collection[int] = ()  # layers that passed their keys to the cache
        self.layers: dict[int, LayerGeometry] = {}
        self.readers: dict[int, int] = {}  # for each layer that reads the keys of another layer: that other layer
        # (mask, sliding window, chunk) of every mask so far; layers share masks
        self._windows: list[tuple[Any, int, int]] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        index = options["layer"]
        name = f"{self.model_type} layer {index} ({type(module).__name__})"
        source = options["reads"]
        if index is None or index in self.layers or index in self.readers:
            raise UsageError(f"{name} runs attention more than once per token, or does not say which layer it is")
        if not getattr(module, "is_causal", True):
            raise UsageError(f"{name} is not causal")
        if index not in self.cached and source is None:
            raise UsageError(f"{name} reads keys that no layer has passed to the cache")
        mask = options["attention_mask"]
        if not any(mask is seen for seen, *_ in self._windows):
            self._windows.append((mask, *self._window(name, mask, self._chunk_of(index))))
        window, chunk = next((window, chunk) for seen, window, chunk in self._windows if mask is seen)
        declared = options.get("sliding_window") or 0
        if window != declared and declared:
            raise UsageError(f"{name} declares a window of {declared}, but its mask shows {window or 'every position'}")
        scale = options.get("scaling")
        geometry = LayerGeometry(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            sliding_window=window,
            softcap=float(options.get("softcap") or 0.0),
            scale=float(key.shape[3] ** -0.5 if scale is None else scale),
            sink_logits=options.get("s_aux") is not None,
            value_in_key=is_latent(module),
            position_in_key=options.get("alibi", False),
            most_picked=options["most_picked"],
            chunk=chunk,
        )
        if source is None:
            self.layers[index] = geometry
        else:
            self.readers[index] = source
            _require_same_attention(name, geometry, source, self.layers[source])
        return query.new_empty(*query.shape[:3], value.shape[3])

    def _chunk_of(self, layer: int) -> int:
        kinds = getattr(self.config, "layer_types", None) or ()
        chunked = layer < len(kinds) and kinds[layer] == "chunked_attention"
        return int(self.config.attention_chunk_size) if chunked else 0

    def _window(self, name: str, mask: PositionMask | None, chunk: int) -> tuple[int, int]:
        """Return how many positions a query sees, its own included (0: all earlier positions), and a chunk size.

        The chunk size is `chunk` if a query sees only positions of its own chunk, otherwise 0.
        """
        if mask is None:
            return 0, 0
        widths = set()
        for q in PROBE_POSITIONS:
            visible: Any
            with unset_fake_temporarily():
                zero, query, keys = torch.tensor(0), torch.tensor(q), torch.arange(q - PROBE_SPAN, q + 2)
                try:
                    visible = torch.as_tensor(mask.visible(zero, zero, query, keys)).expand(keys.shape[0])
                except IndexError:  # the mask looks positions up among the tokens of this call
                    visible = None
                if isinstance(visible, FakeTensor) and chunk:  # chunks begin at the first token that is no padding
                    return 0, chunk
                if visible is None or isinstance(visible, FakeTensor):
                    raise UsageError(
                        f"{name} has a mask that depends on more than positions (attention in blocks); it cannot be "
                        "kept in a merging cache"
                    )
                count = int(visible.sum())
                plain = bool(visible[-1 - count : -1].all())
            if not plain:
                raise UsageError(
                    f"{name} has a mask that is neither causal nor a sliding window; it cannot be kept in a merging "
                    "cache"
                )
            widths.add(0 if count == keys.shape[0] - 1 else count)
        if len(widths) != 1:
            raise UsageError(
                f"{name} attends in chunks of positions (a mask that is neither causal nor a sliding window)"
            )
        return widths.pop(), 0


class Layout(NamedTuple):
    geometry: list[LayerGeometry]  # attention of each layer that has a KV cache
    attention_layers: tuple[int, ...]  # numbers of the layers that have a KV cache; empty if every layer has one
    states: tuple[LayerStates, ...]  # recurrent states of the layers that have one
    readers: dict[int, int]  # for each layer that attends to the cache of another layer, the number of that layer


def probe_layers(model: Any, mode: FakeTensorMode) -> Layout:
    probe, reads = _Probe(model), _Reads()
    kind = model.config.model_type
    _refuse_other_inputs(model)
    failure: Exception | None = None
    try:
        with attending(probe) as probe.cached, recurring(model, probe.cache), torch.no_grad(), mode, reads:
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            model(input_ids=tokens, position_ids=tokens, **probe.cache.as_arguments(model))
    except UsageError:
        raise
    except Exception as error:
        failure = error
    _refuse_experts(model)
    if failure and PositionMask.__name__ in str(failure):
        raise UsageError(
            f"{kind} computes with its attention mask in code of its own; only causal masks and sliding windows can be "
            "kept in a merging cache"
        ) from failure
    if failure and type(probe.cache).__name__ in str(failure):
        raise UsageError(
            f"{kind} keeps its cache in a class of its own, not in those of transformers; it cannot be exported"
        ) from failure
    if failure:
        raise UsageError(
            f"{kind} cannot be traced without its weights: {type(failure).__name__}: {first_line_of(failure)}"
        ) from failure
    text = model.config.get_text_config()
    states = probe.cache.states()
    _refuse_missing_layers(kind, text, probe, {layer.layer for layer in states} | probe.readers.keys())
    if not all(layer.position_in_key for layer in probe.layers.values()):
        _refuse_own_positions(model)
    _refuse_integers(model, reads)
    if is_composite(model.config):
        _keep_read(model, reads)
    attending_layers = tuple(sorted(probe.layers))
    geometry = [probe.layers[i] for i in attending_layers]
    every = len(attending_layers) == text.num_hidden_layers and not states
    return Layout(geometry, () if every else attending_layers, states, probe.readers)


def _require_same_attention(name: str, geometry: LayerGeometry, source: int, own: LayerGeometry) -> None:
    for field in SHARED:
        here, there = getattr(geometry, field), getattr(own, field)
        if here != there:
            raise UsageError(
                f"{name} reads the cache of layer {source} with {field} {here}, but that layer has {there}; it cannot "
                "be exported"
            )


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def _keep_read(model: Any, reads: _Reads) -> None:
    unread = {name for name, x in model.named_parameters(remove_duplicate=False) if id(x) not in reads.ids}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in reads.ids:
                module._parameters[name] = None
    model.unread_parameters |= unread


def _refuse_other_inputs(model: Any) -> None:
    for name, parameter in inspect.signature(model.forward).parameters.items():
        required = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
        if required and name != "input_ids":
            raise UsageError(
                f"{model.config.model_type} needs {name} in every call; only models that run on tokens alone can be "
                "exported"
            )


def _refuse_missing_layers(kind: str, text: Any, probe: _Probe, stateful: set[int]) -> None:
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    missing = [i for i in range(text.num_hidden_layers) if i not in probe.layers and i not in stateful]
    for i in missing:
        if i in probe.cached:
            raise UsageError(
                f"{kind} layer {i} computes attention in its own code, not through the attention interface of "
                "transformers; only decoders that use it can be exported"
            )
    missing = [i for i in missing if kinds[i] not in STATELESS]
    if missing:
        raise UsageError(
            f"{kind} has layers without attention, whose state it keeps in code of its own (state-space or linear "
            f"attention): {len(missing)} of {text.num_hidden_layers}, the first is layer {missing[0]}; it cannot be "
            "exported"
        )


def _refuse_integers(model: Any, reads: _Reads) -> None:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            stored = buffer is not None and name not in module._non_persistent_buffers_set
            if stored and id(buffer) in reads.ids:
                raise UsageError(
                    f"{model.config.model_type} keeps integers in its checkpoint ('{prefix}.{name}', {buffer.dtype}); "
                    "only models whose tensors are floats can be exported"
                )


def _refuse_own_positions(model: Any) -> None:
    taken = "position_ids" in inspect.signature(model.forward).parameters
    # Models like RoBERTa number positions from the padding id without position_ids, and from 0 with them.
    if not taken or any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UsageError(
            f"{model.config.model_type} numbers positions in its own way, not as position_ids from 0; it cannot be "
            "exported"
        )


def _refuse_experts(model: Any) -> None:
    known = {name for name, _ in expert_modules(model)}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and name not in known:
            raise UsageError(
                f"{model.config.model_type} has mixture-of-experts layers (the first is '{name}') that it computes in "
                "its own code, not through the experts interface of transformers; only decoders that use it can be "
                "exported"
            )
