"""The config.json of a checkpoint, read as a config of transformers.

Errors name fields of a wrong type or size, and say why a model cannot be exported.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from kvexport.errors import UsageError
from kvexport.recipe.fields import MOST, Recipe, shown_length

MOST_LAYERS = 10_000  # a bound, because transformers makes lists of all layers before it checks anything
# The names of sizes in config.json, over all model families. Sizes that are given layer by layer, or not at all, are
# left to transformers.
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
SIZES = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "head_dim", "vocab_size"),
    *("num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "max_position_embeddings", "n_positions"),
)


def load_config(source: str, recipe: Recipe) -> Any:
    revision = recipe.model.revision
    raw: dict[str, Any] = {}
    try:
        raw, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        _check_sizes(raw)
        config = AutoConfig.from_pretrained(source, revision=revision)
    except UsageError as error:
        raise UsageError(f"the config.json of {source} cannot be used: {error.problem}", error.fix) from error
    except Exception as error:  # transformers' checks raise their own classes, and wrong types raise any exception
        blamed = blame(raw, lambda rest: CONFIG_MAPPING[raw["model_type"]].from_dict(rest))
        raise UsageError(
            f"transformers cannot read the config.json of {source}: {first_line_of(error)}{blamed}",
            "download config.json again"
            if raw
            else f"for a model of the hub, while online: hf download {source} config.json",
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the model is made of float parameters, however the checkpoint packs them
    kind = getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{kind} is an encoder-decoder; only decoders have a cache that grows with every token")
    text = config.get_text_config()  # a part of the config if the model also reads images or sound
    if type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:  # transformers also names the decoder inside it
        raise UsageError(f"{kind} classifies images, and writes no text; only decoders of text can be exported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UsageError(f"transformers has no decoder (AutoModelForCausalLM) for model type '{kind}'")
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and 0 < positions < recipe.rotary_length:
        _refuse_length(recipe, kind, positions)
    return config


def _refuse_length(recipe: Recipe, kind: str, positions: int) -> NoReturn:
    if recipe.cache.positions == "cache":
        raise UsageError(
            f"cache.positions is cache, and the cache has {recipe.rotary_length} places (budget and slack), but {kind} "
            f"has {positions} positions",
            "--set cache.merge_prompts=chunks, or a smaller limits.max_length"
            if recipe.cache.merge_prompts == "end" and recipe.cache.slack is None
            else f"--set cache.budget={max(positions - recipe.slack, 1)}, or a smaller export.prefill_chunk",
        )
    raise UsageError(
        f"limits.max_length is {shown_length(recipe.limits.max_length)}, but {kind} has {positions} positions",
        f"--set limits.max_length={positions}, or --set cache.positions=cache",
    )


def _check_sizes(raw: Mapping[str, Any]) -> None:
    configs = [section for section in (raw, raw.get("text_config")) if isinstance(section, Mapping)]
    for section in configs:
        latent = "kv_lora_rank" in section  # some latent models call a key's rotated part head_dim, which may be 0
        for name in (*SIZES, *LAYERS):
            if latent and name == "head_dim":
                continue
            value, most = section.get(name), MOST_LAYERS if name in LAYERS else MOST
            if isinstance(value, int | float) and not (type(value) is int and 1 <= value <= most):
                raise UsageError(
                    f"{name} should be an integer from 1 to {most}, found {value!r}", "download config.json again"
                )


def blame(raw: Mapping[str, Any], works: Callable[[dict[str, Any]], object]) -> str:
    """Return a hint that names the first field of config.json without which `works` succeeds; "" if there is none."""
    for name, rest in _without_one(raw):
        try:
            works(rest)
        except Exception:
            continue
        return f" (without its {name} it can)"
    return ""


def _without_one(raw: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in raw:
        yield name, {key: value for key, value in raw.items() if key != name}
    if isinstance(text := raw.get("text_config"), Mapping):
        for name, rest in _without_one(text):
            yield f"text_config.{name}", {**raw, "text_config": rest}


def first_line_of(error: Exception) -> str:
    """Return an error's message as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__
