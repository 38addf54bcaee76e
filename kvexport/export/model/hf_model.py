"""Construction of Hugging Face decoders without weights, and refusal of models that kvexport cannot export."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from kvexport.errors import UsageError
from kvexport.export.hooks.attention import IMPLEMENTATION
from kvexport.export.hooks.experts import IMPLEMENTATION as EXPERTS
from kvexport.export.hooks.experts import find_forms
from kvexport.export.hooks.indexer import leave_out_indexers, picks_alone
from kvexport.export.hooks.latent import check_expansions, note_expansions
from kvexport.export.hooks.llama4 import route_to_experts, scale_by_positions
from kvexport.export.hooks.own_attention import OWN, lead
from kvexport.export.model.config import blame, first_line_of

_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")  # types whose class for text has no image encoder
OWN_KEYS = {
    "indexer": "picks the tokens that a query sees with an indexer",
    "compressor": "lets queries see summaries of tokens, made by a compressor",
}
"""What modules of attention layers with additional keys do, by the last part of the modules' names."""


def build_fake(config: Any, dtype: torch.dtype, max_length: int) -> tuple[Any, FakeTensorMode]:
    """Make a model of transformers in eval mode without its weights.

    Parameters are fake tensors, which have a shape and a type but no memory. Buffers that no checkpoint stores, such as
    rotary frequencies, are real. Buffers that checkpoints store become parameters.
    """
    _refuse_own_attention(config)
    try:
        model = on_meta(config, dtype, max_length)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):  # the model has its own attention classes
            raise _own_attention(config) from error
        blamed = blame(config.to_dict(), lambda rest: on_meta(type(config).from_dict(rest), dtype, max_length))
        raise UsageError(
            f"transformers cannot make a {config.model_type} of config.json: {first_line_of(error)}{blamed}",
            "download config.json again" if blamed else "",
        ) from error
    buffers_as_parameters(model)
    _refuse_indexers(model)
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
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) == "vision":  # among the tokens of an image, not in text
        text.use_bidirectional_attention = None
    model = without_weights(config, dtype, attention, EXPERTS if attention == IMPLEMENTATION else "eager")
    if attention == IMPLEMENTATION:
        hook_modules(model)
        route_to_experts(model)
    fix_rotary_frequencies(model, max_length)
    return lead(model) if attention == IMPLEMENTATION else model


def without_weights(config: Any, dtype: torch.dtype, attention: str, experts: str) -> Any:
    """Make a model of transformers whose parameters have no memory; buffers that no checkpoint stores are real."""
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_by_part(config, attention),
            experts_implementation=experts,
        )
    _initialize_buffers(model, model)
    model.tie_weights()
    return model


def hook_modules(model: Any) -> None:
    """Change modules of a model that compute by themselves what kvexport's attention hook needs to see."""
    leave_out_indexers(model)
    note_expansions(model)
    scale_by_positions(model)


def attention_by_part(config: Any, attention: str) -> Any:
    if attention == IMPLEMENTATION and config.model_type in OWN:
        return "eager"
    text = config.get_text_config()
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    others = {name: "eager" for name, part in parts.items() if part is not None and part.get_text_config() is not text}
    return {"": attention, **dict.fromkeys(parts, attention), **others} if others else attention


def auto_class(config: Any) -> Any:
    of_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in _WITH_IMAGES
    return AutoModelForCausalLM if of_text else AutoModelForImageTextToText


def decoder_class(config: Any) -> Any:
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def _initialize_buffers(module: Any, owner: Any) -> None:
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        _initialize_buffers(child, owner)
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    if buffers:
        # The parameters of the module stay without memory, because an embedding would be filled with random numbers,
        # perhaps billions.
        module._buffers.update({name: torch.empty_like(buffer, device="cpu") for name, buffer in buffers.items()})
        with torch.no_grad():
            owner._init_weights(module)
    if isinstance(module, PreTrainedModel):  # a model may initialize buffers of its layers (Falcon-H1's multipliers)
        with torch.no_grad():
            owner._init_weights(module)


def buffers_as_parameters(model: Any) -> None:
    """Turn the persistent buffers of a model into parameters.

    Checkpoints store these buffers (Apertus' activation, Gemma 4's layer scalars), so the values that transformers
    computes are only initial values. Buffers of integers stay buffers: a model that reads them is refused later.
    """
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or name in module._non_persistent_buffers_set or not buffer.is_floating_point():
                continue
            del module._buffers[name]
            module._parameters[name] = nn.Parameter(buffer, requires_grad=False)


def _refuse_own_attention(config: Any) -> None:
    decoder: Any = decoder_class(config)
    if is_composite(config):
        return  # a probe finds the layers of a wrapper's decoder that compute attention in their own code
    if not _has_heads(config):
        if any(_has_heads(part) for name in config.sub_configs if (part := getattr(config, name, None)) is not None):
            raise UsageError(
                f"{config.model_type} is made of several models ({', '.join(config.sub_configs)}), of which "
                "transformers names none as the decoder of text; it cannot be exported"
            )
    elif not decoder._can_set_attn_implementation() and config.model_type not in OWN:
        raise _own_attention(config)


def _own_attention(config: Any) -> UsageError:
    return UsageError(
        f"{config.model_type} computes attention in its own code (as most models with ALiBi or other biases do), not "
        "through the attention interface of transformers; only decoders that use it can be exported"
    )


def _has_heads(config: Any) -> bool:
    try:
        return hasattr(config, "num_attention_heads")
    except Exception:  # transformers raises an error for a number of heads that differs by layer
        return True


def _refuse_indexers(model: Any) -> None:
    for name, module in model.named_modules():
        if (last := name.split(".")[-1]) in OWN_KEYS and not picks_alone(module):
            raise UsageError(
                f"{model.config.model_type} {OWN_KEYS[last]} ('{name}'), whose keys would have to be merged with those "
                "of attention; it cannot be exported"
            )


def fix_rotary_frequencies(model: nn.Module, max_length: int) -> None:
    """Fix rotary frequencies that depend on the sequence length (dynamic, longrope) at those of `max_length` tokens.

    An ONNX graph has one set of frequencies, and keys in the KV cache cannot be rotated again.
    """
    last = torch.full((1, 1), max_length - 1)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            with torch.no_grad():
                module(torch.zeros(1, 1, 1), last)
            module.rope_type = "fixed"  # type: ignore[assignment]
        elif isinstance(kinds, dict):  # one rotary embedding for each kind of layer
            for layers in [layers for layers, kind in kinds.items() if _depends_on_length(kind)]:
                with torch.no_grad():
                    module(torch.zeros(1, 1, 1), last, layers)
                kinds[layers] = "fixed"


def _depends_on_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def length_notes(config: Any, max_length: int) -> list[str]:
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


def is_composite(config: Any) -> bool:
    return config.get_text_config() is not config
