"""The architectures of GGUF files: llama.cpp's names of tensors and sizes, and transformers' names for them.

Source: llama.cpp's gguf-py/gguf/constants.py and convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GATE_EXPERTS, UP_EXPERTS, DOWN_EXPERTS = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
EXPERTS = (GATE_EXPERTS, UP_EXPERTS, DOWN_EXPERTS)
"""llama.cpp's names of the tensors that have the matrices of all experts of a layer."""
BARE = ("self_attn.sinks",)
"""Parameters of transformers whose names end neither in .weight nor in .bias."""
SQUEEZED = ("conv.conv",)
"""Modules of transformers whose weight [channels, 1, taps] a GGUF file stores as [channels, taps]."""
ONE_ROW = ("mlp.shared_expert_gate",)
"""Modules of transformers whose weight [1, inputs] a GGUF file may store as [inputs]."""

Meta = Mapping[str, Any]
"""The metadata of a GGUF file whose keys begin with the architecture's name, by the rest of the key."""


@dataclass(frozen=True)
class Architecture:
    model_type: str  # transformers' name
    model_class: str  # name of transformers' class
    names: Mapping[str, str]  # llama.cpp's names of tensors, without layer and ending -> transformers' names
    pairs: bool = False  # whether rows of query and key weights are stored as rotary pairs (2i, 2i + 1)
    # Whether the file stores the weights of norms plus 1 (the module of transformers adds the 1 itself)
    shifted: bool = False
    partial: bool = False  # whether config.json says which part of a head is rotated
    linear: str = ""  # layout of linear attention's tensors (`gguf_linear_attention`); empty without such layers
    # A function from the metadata and the rotary settings to entries of config.json, in addition to or instead of those
    # that all architectures have
    config: Callable[[Meta, dict[str, Any]], dict[str, Any]] = lambda meta, rope: {}


def shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _qwen3_moe(meta: Meta, _: Any) -> dict[str, Any]:
    # llama.cpp always normalizes the weights of the chosen experts, so GGUF files have no key for it.
    return {
        "num_experts": meta["expert_count"],
        "num_experts_per_tok": meta["expert_used_count"],
        "moe_intermediate_size": meta["expert_feed_forward_length"],
        "norm_topk_prob": True,
    }


def _linear_attention(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    layers, every = range(meta["block_count"] - meta.get("nextn_predict_layers", 0)), meta["full_attention_interval"]
    sections = [size for size in meta.get("rope.dimension_sections", ()) if size]
    return {
        "num_hidden_layers": len(layers),
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in layers],
        "linear_conv_kernel_dim": meta["ssm.conv_kernel"],
        "linear_key_head_dim": meta["ssm.state_size"],
        "linear_num_key_heads": meta["ssm.group_count"],
        "linear_num_value_heads": meta["ssm.time_step_rank"],
        "linear_value_head_dim": meta["ssm.inner_size"] // meta["ssm.time_step_rank"],
        "rope_parameters": {**rope, **({"mrope_section": sections, "mrope_interleaved": True} if sections else {})},
    }


def _linear_attention_and_experts(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        **_linear_attention(meta, rope),
        **_qwen3_moe(meta, rope),
        "shared_expert_intermediate_size": meta["expert_shared_feed_forward_length"],
    }


def _gpt_oss(meta: Meta, _: Any) -> dict[str, Any]:
    layers = range(meta["block_count"])
    return {
        "num_local_experts": meta["expert_count"],
        "num_experts_per_tok": meta["expert_used_count"],
        "intermediate_size": meta["expert_feed_forward_length"],
        "sliding_window": meta["attention.sliding_window"],
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers],
        "attention_bias": True,
    }


def _granite(meta: Meta, _: Any) -> dict[str, Any]:
    return {
        "attention_multiplier": shortest(meta["attention.scale"]),
        "embedding_multiplier": shortest(meta["embedding_scale"]),
        "residual_multiplier": shortest(meta["residual_scale"]),
        "logits_scaling": shortest(meta["logit_scale"]),
    }


def _gemma2(meta: Meta, _: Any) -> dict[str, Any]:
    # llama.cpp scales queries by another number only in the 27B model, which has 46 layers.
    scalar = meta["embedding_length"] // meta["attention.head_count"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": shortest(meta["attn_logit_softcapping"]),
        "final_logit_softcapping": shortest(meta["final_logit_softcapping"]),
        "sliding_window": meta["attention.sliding_window"],
        "query_pre_attn_scalar": scalar if meta["block_count"] == 46 else meta["attention.key_length"],
    }


def _gemma3(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp scales queries by another number only in the 27B model, which has 62 layers. Layers with a sliding
    # window rotate by a base of 10,000, which GGUF files do not store.
    scalar = meta["embedding_length"] // meta["attention.head_count"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta["attention.sliding_window"],
        "query_pre_attn_scalar": scalar if meta["block_count"] == 62 else meta["attention.key_length"],
        "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(meta["block_count"])],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }


def _phi3(meta: Meta, _: Any) -> dict[str, Any]:
    return {"sliding_window": meta.get("attention.sliding_window")}


def _lfm2(meta: Meta, _: Any) -> dict[str, Any]:
    heads = meta["attention.head_count_kv"]  # one number for each layer, 0 for a convolution
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": shortest(meta["attention.layer_norm_rms_epsilon"]),
        "conv_L_cache": meta["shortconv.l_cache"],
        "conv_bias": False,
    }


_HYBRID_NAMES = {
    **{name: mine for name, mine in _NAMES.items() if name != "ffn_norm"},
    **_HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
}
_SHARED_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    **dict.fromkeys(EXPERTS, "mlp.experts"),
}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", {**_NAMES, **_MLP}, pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {**_NAMES, **_MLP}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_NAMES, **_MLP, **_HEAD_NORMS}),
    # The positions of text are those of a Qwen2 or Qwen3; `gguf_vision` adds those of images.
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", {**_NAMES, **_MLP}),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", {**_NAMES, **_MLP, **_HEAD_NORMS}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_NAMES, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate", **dict.fromkeys(EXPERTS, "mlp.experts")},
        config=_qwen3_moe,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**_HYBRID_NAMES, **_SHARED_EXPERTS},
        shifted=True,
        partial=True,
        linear="qwen3next",
        config=_linear_attention_and_experts,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        {**_HYBRID_NAMES, **_MLP},
        shifted=True,
        partial=True,
        linear="qwen35",
        config=_linear_attention,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        {**_HYBRID_NAMES, **_SHARED_EXPERTS},
        shifted=True,
        partial=True,
        linear="qwen35",
        config=_linear_attention_and_experts,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **{name: mine for name, mine in _NAMES.items() if name != "ffn_norm"},
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            **dict.fromkeys(EXPERTS, "mlp.experts"),
        },
        config=_gpt_oss,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", {**_NAMES, **_MLP}, pairs=True, config=_granite),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {**_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        partial=True,
        config=_phi3,
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        {
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        config=_lfm2,
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", {**_NAMES, **_MLP, **_FOUR_NORMS}, shifted=True, config=_gemma2
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_NAMES, **_MLP, **_FOUR_NORMS, **_HEAD_NORMS},
        shifted=True,
        config=_gemma3,
    ),
}
"""The architectures, by llama.cpp's name."""
