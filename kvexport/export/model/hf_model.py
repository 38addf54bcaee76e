"""Construction of Hugging Face decoders without weights, and detection of the attention of their layers.

A model that kvexport cannot export is refused with an error that names the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from kvexport.cache import LayerGeometry, LayerStates
from kvexport.errors import UsageError
from kvexport.export.hooks.attention import IMPLEMENTATION, attending
from kvexport.export.hooks.experts import IMPLEMENTATION as EXPERTS
from kvexport.export.hooks.experts import expert_modules, find_forms
from kvexport.export.hooks.latent import check_expansions
from kvexport.export.hooks.recurrence import RecurrentCache, recurring
from kvexport.export.model.config import blame, first_line_of

PROBE_POSITIONS = (1 << 20, (1 << 20) + 1, (1 << 20) + 37)
PROBE_SPAN = 1 << 18


def build_fake(config: Any, dtype: torch.dtype, max_length: int) -> tuple[Any, FakeTensorMode]:
    """Make a model of transformers in eval mode without its weights.

    Parameters are fake tensors (shape and type, no memory). Buffers that no checkpoint stores, such as rotary
    frequencies, are real. Buffers that checkpoints store become parameters.

    Returns:
        The model, and the mode of its fake tensors.

    Raises:
        UsageError: transformers cannot make the model, or the model does not use its attention interface.
    """
    _refuse_own_attention(config)
    try:
        model = on_meta(config, dtype, max_length)
    except Exception as error:
        blamed = blame(config.to_dict(), lambda rest: on_meta(type(config).from_dict(rest), dtype, max_length))
        raise UsageError(
            f"transformers cannot make a {config.model_type} of config.json: {first_line_of(error)}{blamed}",
            "download config.json again" if blamed else "",
        ) from error
    buffers_as_parameters(model)
    find_forms(model)
    check_expansions(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shared: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    with mode:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in shared:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    shared[id(parameter)] = nn.Parameter(fake, requires_grad=False)
                    shared[id(shared[id(parameter)])] = shared[id(parameter)]
                module._parameters[name] = shared[id(parameter)]
    return model.eval(), mode


def on_meta(config: Any, dtype: torch.dtype, max_length: int, attention: str = IMPLEMENTATION) -> Any:
    """Return the model of a config with parameters on the meta device and real buffers.

    Args:
        config: The config.
        dtype: The type of parameters.
        max_length: The longest sequence, for rotary frequencies that depend on the length.
        attention: Name of an attention implementation of transformers.
    """
    with torch.device("meta"):
        experts = EXPERTS if attention == IMPLEMENTATION else "eager"
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention, experts_implementation=experts
        )
    _initialize_buffers(model, model)
    model.tie_weights()
    fix_rotary_frequencies(model, max_length)
    return model


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes the decoder of a config.

    That is AutoModelForCausalLM where transformers has a decoder of text for the config, else
    AutoModelForImageTextToText, whose models also read `input_ids` alone.
    """
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def decoder_class(config: Any) -> Any:
    """Return the class of transformers that is the decoder of a config; None if transformers has no decoder for it."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def _initialize_buffers(module: Any, owner: Any) -> None:
    """Compute the buffers of a module on the CPU, as the nearest pretrained module around it initializes them."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        _initialize_buffers(child, owner)
    if any(buffer is not None for buffer in module._buffers.values()):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            owner._init_weights(module)
    if isinstance(module, PreTrainedModel):  # a model may fill buffers of its layers (Falcon-H1's multipliers)
        with torch.no_grad():
            owner._init_weights(module)


def buffers_as_parameters(model: Any) -> None:
    """Turn the persistent buffers of a model into parameters.

    Checkpoints store them (Apertus' activation, Gemma 4's layer scalars), so the values that transformers computes are
    only their initial ones.
    """
    for prefix, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if not buffer.is_floating_point():
                raise UsageError(
                    f"{model.config.model_type} keeps integers in its checkpoint ('{prefix}.{name}', {buffer.dtype}); "
                    "only models whose tensors are floats can be exported"
                )
            del module._buffers[name]
            module._parameters[name] = nn.Parameter(buffer, requires_grad=False)


def _refuse_own_attention(config: Any) -> None:
    decoder: Any = decoder_class(config)
    if not hasattr(config.get_text_config(), "num_attention_heads"):
        raise UsageError(
            f"{config.model_type} has layers without attention (state-space or linear attention); only decoders whose "
            "every layer attends can be exported"
        )
    if not decoder._can_set_attn_implementation():
        raise UsageError(
            f"{config.model_type} computes attention in its own code (as most models with ALiBi or other biases do), "
            "not through the attention interface of transformers; only decoders that use it can be exported"
        )


def fix_rotary_frequencies(model: nn.Module, max_length: int) -> None:
    """Fix rotary frequencies that depend on the length so far (dynamic, longrope) at those of the longest sequence.

    An ONNX graph has one set of frequencies, and rotated keys cannot be rotated again.
    """
    last = torch.full((1, 1), max_length - 1)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            with torch.no_grad():
                module(torch.zeros(1, 1, 1), last)
            module.rope_type = "fixed"  # type: ignore[assignment]
        elif isinstance(kinds, dict):  # one for each kind of layer
            for layers in [layers for layers, kind in kinds.items() if _depends_on_length(kind)]:
                with torch.no_grad():
                    module(torch.zeros(1, 1, 1), last, layers)
                kinds[layers] = "fixed"


def _depends_on_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def length_notes(config: Any, max_length: int) -> list[str]:
    """Return notes for the user on rotary frequencies that depend on the sequence length.

    `fix_rotary_frequencies` fixes them at those of the longest sequence, so shorter sequences do not get the
    frequencies that transformers would give them.
    """
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    notes = []
    for rope in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
        original = rope.get("original_max_position_embeddings")
        if _depends_on_length(rope.get("rope_type", "")) and original and max_length > original:
            notes.append(
                f"rotary frequencies ({rope['rope_type']}) are those of limits.max_length {max_length}: sequences of "
                f"up to {original} tokens differ from transformers; with --set limits.max_length={original} they do not"
            )
    return notes


class _Probe:
    """A recorder of how each layer calls its attention, in a forward pass on fake tensors."""

    def __init__(self, model: Any) -> None:
        self.model_type = model.config.model_type
        self.cache = RecurrentCache(self.model_type)
        self.layers: dict[int, LayerGeometry] = {}
        self._windows: list[tuple[Any, int]] = []  # of masks that were looked at; layers share them

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        index = getattr(module, "layer_idx", None)
        name = f"{self.model_type} layer {index} ({type(module).__name__})"
        if index is None or index in self.layers:
            raise UsageError(f"{name} runs attention more than once per token, or does not say which layer it is")
        if not getattr(module, "is_causal", True):
            raise UsageError(f"{name} is not causal")
        if index not in self.cache.updated:
            raise UsageError(f"{name} has no cache of its own: it reads another layer's keys")
        mask = options["attention_mask"]
        if not any(mask is seen for seen, _ in self._windows):
            self._windows.append((mask, self._window(name, mask)))
        window = next(window for seen, window in self._windows if mask is seen)
        declared = options.get("sliding_window") or 0
        if window != declared and declared:
            raise UsageError(f"{name} declares a window of {declared}, but its mask shows {window or 'every position'}")
        scale = options.get("scaling")
        self.layers[index] = LayerGeometry(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            sliding_window=window,
            softcap=float(options.get("softcap") or 0.0),
            scale=float(key.shape[3] ** -0.5 if scale is None else scale),
            sink_logits=options.get("s_aux") is not None,
        )
        return query.new_empty(*query.shape[:3], value.shape[3])

    def mask(self, mask_function: Any) -> Any:
        return mask_function

    def _window(self, name: str, mask_function: Any) -> int:
        """Return the size of a layer's sliding window, the number of positions that a query sees; 0 for all.

        A query's own position counts.

        Raises:
            UsageError: The mask is neither causal nor a plain window.
        """
        if mask_function is None:
            return 0
        widths = set()
        for q in PROBE_POSITIONS:
            visible: Any
            with unset_fake_temporarily():
                zero, query, keys = torch.tensor(0), torch.tensor(q), torch.arange(q - PROBE_SPAN, q + 2)
                try:
                    visible = torch.as_tensor(mask_function(zero, zero, query, keys)).expand(keys.shape[0])
                except IndexError:  # it looks positions up among the tokens of this call
                    visible = None
                if visible is None or isinstance(visible, FakeTensor):
                    raise UsageError(
                        f"{name} has a mask that depends on more than positions (attention in chunks or blocks); it "
                        "cannot be kept in a merging cache"
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
        return widths.pop()


class Layout(NamedTuple):
    """The layers of a model as a probe found them.

    Attributes:
        geometry: The attention of each layer that attends.
        attention_layers: The numbers of these layers; empty if every layer attends.
        states: The recurrent states of the layers that have one.
    """

    geometry: list[LayerGeometry]
    attention_layers: tuple[int, ...]
    states: tuple[LayerStates, ...]


def probe_layers(model: Any, mode: FakeTensorMode) -> Layout:
    """Return the geometry of every layer's attention, and the recurrent states of the other layers.

    Raises:
        UsageError: A layer has a state that cannot be exported, or an unusual attention; the error names it.
    """
    probe, reads = _Probe(model), _Reads()
    kind = model.config.model_type
    failure: Exception | None = None
    try:
        with attending(probe), recurring(model, probe.cache), torch.no_grad(), mode, reads:
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            model(input_ids=tokens, position_ids=tokens, past_key_values=probe.cache, use_cache=True)
    except UsageError:
        raise
    except Exception as error:
        failure = error
    _refuse_experts(model)
    if failure and "'function' object" in str(failure):  # the mask, which stays a function of positions here
        raise UsageError(
            f"{kind} computes with its attention mask in code of its own; only causal masks and sliding windows can be "
            "kept in a merging cache"
        ) from failure
    if failure:
        raise UsageError(
            f"{kind} cannot be traced without its weights: {type(failure).__name__}: {first_line_of(failure)}"
        ) from failure
    count = model.config.get_text_config().num_hidden_layers
    states = probe.cache.states()
    stateful = {layer.layer for layer in states}
    missing = [i for i in range(count) if i not in probe.layers and i not in stateful]
    if missing:
        raise UsageError(
            f"{kind} has layers without attention, whose state it keeps in code of its own (state-space or linear "
            f"attention): {len(missing)} of {count}, the first is layer {missing[0]}; it cannot be exported"
        )
    if not probe.layers:
        raise UsageError(
            f"{kind} has no layer that attends (state-space or linear attention alone), so it has no cache to compress"
        )
    _refuse_own_positions(model)
    if is_composite(model.config):
        _keep_read(model, reads)
    attending_layers = tuple(sorted(probe.layers))
    geometry = [probe.layers[i] for i in attending_layers]
    return Layout(geometry, attending_layers if states else (), states)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of the tensors that PyTorch operations read, by the tensors' ids."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def is_composite(config: Any) -> bool:
    """Return whether the config describes more than a decoder of text, such as an encoder of images."""
    return config.get_text_config() is not config


def _keep_read(model: Any, reads: _Reads) -> None:
    """Remove the parameters that a forward pass on tokens does not read: those of image and audio encoders."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in reads.ids:
                module._parameters[name] = None


def text_part_notes(config: Any) -> list[str]:
    """Return a note that only the text decoder is built, if the model has other parts such as an image encoder."""
    return [f"the text part of {config.model_type} is built: it reads no images"] if is_composite(config) else []


def _refuse_own_positions(model: Any) -> None:
    taken = "position_ids" in inspect.signature(model.forward).parameters
    # RoBERTa's kin begin at the padding id where nobody says so, and at 0 where somebody does.
    if not taken or any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UsageError(
            f"{model.config.model_type} numbers positions in its own way, not as position_ids from 0; it cannot be "
            "exported"
        )


def _refuse_experts(model: Any) -> None:
    """Raise UsageError if the model computes experts in code of its own, which no registered function can replace."""
    known = {name for name, _ in expert_modules(model)}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and name not in known:
            raise UsageError(
                f"{model.config.model_type} has mixture-of-experts layers (the first is '{name}') that it computes in "
                "its own code, not through the experts interface of transformers; only decoders that use it can be "
                "exported"
            )


def parameter_sources(model: Any, tensors: Iterable[str]) -> dict[str, str]:
    """Return the name of the checkpoint tensor of each parameter, by transformers' renaming rules.

    Tied parameters share a tensor. Parameters that transformers would assemble from several tensors (experts stored one
    by one) are left out.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sources = {}
    for tensor in tensors:
        name, converted = rename_source_key(tensor, renamings, converters, model.base_model_prefix, parameters)
        if converted is None:
            sources[name] = tensor
    by_identity = {id(parameters[name]): tensor for name, tensor in sources.items() if name in parameters}
    return {name: source for name, p in parameters.items() if (source := sources.get(name, by_identity.get(id(p))))}
