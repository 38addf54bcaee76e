"""The attention hook for older decoders, which compute attention in code of their own.

transformers calls a registered attention function only in decoders that use its attention interface. For the other
decoders, which `OWN` lists, `lead` replaces the method that computes attention by a method that calls the hook.

ALiBi adds slope * position to a logit, with the position of the key and a slope for each query head. (Softmax ignores
the position of the query, which all logits of a query share.) Here a key carries its position, and a query its slope,
in `POSITION_SIZE` numbers behind their own. A merged key therefore has the mean position of its members, with the
weights of the merge.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import sliding_window_causal_mask_function

from kvexport.export.hooks.attention import IMPLEMENTATION, PassThroughCache, PositionMask, attend, token_positions

POSITION_SIZE = 8  # CUDA kernels read keys in steps of 16 bytes
POSITION_UNIT = 2.0**-10  # the factor of positions in keys, small so that the nearest key is the nearest in content
EXACT = 32  # float16 holds each multiple of this up to 65,504, and each smaller number


def lead(model: Any) -> Any:
    """Make a model whose type is listed in `OWN` compute attention by the attention hook; return the model."""
    if model.config.model_type in OWN:
        slopes = alibi_slopes(model)
        for class_name, (method, replacement) in OWN[model.config.model_type].items():
            for i, module in enumerate(module for module in model.modules() if type(module).__name__ == class_name):
                module.layer_idx, module.slopes = i, slopes
                setattr(module, method, partial(replacement, module))
        model.config._attn_implementation = IMPLEMENTATION
    return model


def alibi_slopes(model: Any) -> list[float] | None:
    """Return the ALiBi slope of each query head, by the model's own function; None for a model without ALiBi."""
    code, heads = vars(sys.modules[type(model).__module__]), model.config.num_attention_heads
    if build := code.get("build_mpt_alibi_tensor"):
        bias = build(heads, 2)
    elif (build := code.get("build_alibi_tensor")) and getattr(model.config, "alibi", True):
        bias = build(torch.ones(1, 2), heads, torch.float32)
    else:
        return None
    slopes: list[float] = (bias[:, 0, 1] - bias[:, 0, 0]).tolist()
    return slopes


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, *, falcon: bool = False
) -> Tensor:
    """Compute a layer's attention by the attention hook; return the attention output [B, Hq, T, Dv].

    With `falcon`, a bias of ALiBi is rounded to bfloat16 and then multiplied with `scale`, as Falcon does.
    """
    options = {"attention_mask": mask, "scaling": scale, "alibi": module.slopes is not None}
    if module.slopes is not None:
        slopes = torch.tensor(module.slopes, device=key.device)[:, None, None]
        position = token_positions(key)[:, None, :, None].float()  # [B, 1, T, 1]
        if falcon:
            position = (slopes * position.bfloat16().float()).bfloat16().float() / slopes
            slopes = slopes * scale
        rest = position % EXACT
        parts = torch.cat([position - rest, rest], -1) * POSITION_UNIT
        slopes = (slopes / (scale * POSITION_UNIT)).expand(*query.shape[:3], 2)
        key, query = (
            functional.pad(torch.cat([x, more.to(x.dtype)], -1), (0, POSITION_SIZE - 2))
            for x, more in ((key, parts.expand(*key.shape[:3], 2)), (query, slopes))
        )
    return attend(module, query.to(key.dtype), key, value, options)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _attn(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    return _attend(module, query, key, value, mask, key.shape[3] ** -0.5), None


def _gpt_neo(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, None]:
    if module.attention_type == "local":
        mask = PositionMask(sliding_window_causal_mask_function(module.config.window_size))
    return _attend(module, query, key, value, mask, 1.0), None


def _openai(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    key, value = PassThroughCache().update(key.transpose(2, 3), value, module.layer_idx)
    return [_attend(module, query, key, value, None, key.shape[3] ** -0.5)]


def _xglm(module: Any, hidden: Tensor, past_key_values: Any, attention_mask: Any, **_: Any) -> tuple[Tensor, None]:
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (_heads(projection(hidden), module.num_heads) for projection in projections)
    key, value = past_key_values.update(key, value, module.layer_idx)
    return module.out_proj(_joined(_attend(module, query, key, value, attention_mask, module.scaling))), None


def _xglm_positions(module: Any, position_ids: Tensor, *_: Any) -> Tensor:
    """Return rows of XGLM's position table; the model's own code would enlarge the table in calls of many tokens."""
    rows: Tensor = module.weights[position_ids + module.offset]
    return rows


def _mpt(module: Any, hidden: Tensor, past_key_values: Any, attention_mask: Any, **_: Any) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (_heads(x, module.n_heads) for x in mixed.chunk(3, 2))
    key, value = past_key_values.update(key, value, module.layer_idx)
    return module.out_proj(_joined(_attend(module, query, key, value, attention_mask, module.softmax_scale))), None


def _bloom(
    module: Any, hidden: Tensor, residual: Tensor, layer_past: Any, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden))
    key, value = layer_past.update(key, value, module.layer_idx)
    output = _attend(module, query, key, value, attention_mask, module.inv_norm_factor)
    return module.dense(_joined(output)) + residual, None


def _falcon(
    module: Any, hidden: Tensor, layer_past: Any, attention_mask: Any, position_embeddings: Any, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden)))
    if module.slopes is not None:  # its rounded positions differ by query head
        key, value = key.expand_as(query), value.expand_as(query)
    else:
        repeats = key.shape[1] // module.num_kv_heads  # the code repeats a key for every query head of its group
        key, value = key[:, ::repeats], value[:, ::repeats]
        query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, module.layer_idx)
    output = _attend(module, query, key, value, attention_mask, module.inv_norm_factor, falcon=True)
    return module.dense(_joined(output)), None


OWN: dict[str, dict[str, tuple[str, Any]]] = {
    "bloom": {"BloomAttention": ("forward", _bloom)}, "codegen": {"CodeGenAttention": ("_attn", _attn)},
    "falcon": {"FalconAttention": ("forward", _falcon)}, "gpt_neo": {"GPTNeoSelfAttention": ("_attn", _gpt_neo)},
    "gpt_neox_japanese": {"GPTNeoXJapaneseAttention": ("_attn", _attn)}, "gptj": {"GPTJAttention": ("_attn", _attn)},
    "mpt": {"MptAttention": ("forward", _mpt)}, "openai-gpt": {"Attention": ("_attn", _openai)},
    "xglm": {"XGLMAttention": ("forward", _xglm), "XGLMSinusoidalPositionalEmbedding": ("forward", _xglm_positions)},
}  # fmt: skip
"""For each model type, by the class of a module: the method that is replaced, and what replaces it."""
