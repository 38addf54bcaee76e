"""Tiny random decoders of many types in GGUF files, as llama.cpp's conversion writes them.

The names of tensors are those of the package gguf (`gguf.get_tensor_name_map`); `CASES` says what else the conversion
changes. Source: llama.cpp's folder conversion/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.gguf_files import F32, Q8_0, Tensors, entry, gguf, q8_0

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LENGTH = 48  # tokens of a text, more than the windows below
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
GLM = {"head_dim": 16, "attention_bias": True, "rope_parameters": HALF}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_META = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
WINDOWS = {
    "sliding_window": 24, "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}  # fmt: skip
SLIDING = {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, True, True, False]}
# llama.cpp's keys of numbers that its conversion reads from config.json under one of several names
KEYS = {
    "embedding_length": ("hidden_size",), "feed_forward_length": ("intermediate_size",),
    "context_length": ("max_position_embeddings",), "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",), "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim",), "attention.value_length": ("head_dim",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"), "expert_feed_forward_length": ("moe_intermediate_size",),
}  # fmt: skip
SIGMOID = 2  # llama.cpp's number of a function that scores experts
LEADING = {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": SIGMOID}
SCALED = {**LEADING, "expert_weights_scale": 1.5, "expert_weights_norm": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {**EXPERTS, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GRANITE = {
    "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT_META = {
    "attention.kv_lora_rank": 32, "rope.dimension_count": 16, "expert_shared_count": 1, "leading_dense_block_count": 1,
}  # fmt: skip
HALVES = {  # what newer conversions say of latent attention: the sizes of latent vectors, and those of heads beside
    **LATENT_META, "attention.key_length": 48, "attention.value_length": 32, "attention.head_count_kv": 1,
    "attention.key_length_mla": 48, "attention.value_length_mla": 32,
}  # fmt: skip
LATENT_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "sliding_window": 24, "tie_word_embeddings": True,
    "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2],
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": PLAIN,
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
GEMMA4_META = {
    "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
    "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 10000.0, "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [True, True, False] * 2, "final_logit_softcapping": 30.0,
}  # fmt: skip
ROTATED_QUARTER = np.where(np.arange(16) < 4, 1, 1e30).astype(np.float32)
GEMMA4_NAMES = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
}  # fmt: skip
GRANITE_NAMES = {
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight", "shared_mlp.gate.weight": "ffn_gate_shexp.weight",
    "shared_mlp.up.weight": "ffn_up_shexp.weight", "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    **{f"block_sparse_moe.experts.{x}_proj.weight": f"ffn_{x}_exps.weight" for x in ("gate", "up", "down")},
}  # fmt: skip
MAMBA = {
    "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16, "position_embedding_type": None,
}  # fmt: skip
MAMBA_META = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 1,
}  # fmt: skip
MAMBA_NAMES = {
    "shared_mlp.gate.weight": "ffn_gate.weight", "shared_mlp.up.weight": "ffn_up.weight",
    "shared_mlp.output_linear.weight": "ffn_down.weight", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
}  # fmt: skip
FALCON_H1 = {
    "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.5, "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.25, "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0,
    "mlp_multipliers": [0.5, 2.0], "ssm_multipliers": [2.0, 0.5, 4.0, 0.25, 0.5], "mamba_rms_norm": True,
    "mamba_norm_before_gate": False, "mamba_d_ssm": 128, "mamba_n_groups": 2,
    **{key: x for key, x in MAMBA.items() if key in ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv")},
}  # fmt: skip
FALCON_H1_SCALES = {
    "model.embed_tokens.weight": 2.0, "lm_head.weight": 0.5, "self_attn.q_proj.weight": 2.0,
    "self_attn.k_proj.weight": 1.0, "self_attn.v_proj.weight": 2.0, "self_attn.o_proj.weight": 0.25,
    "feed_forward.gate_proj.weight": 0.5, "feed_forward.down_proj.weight": 2.0, "mamba.out_proj.weight": 2.0,
    "mamba.in_proj.weight": 0.5 * np.repeat([2, 0.5, 4, 0.25, 0.5], [128, 128, 32, 32, 4])[:, None].astype(np.float32),
}  # fmt: skip
MIXER_NAMES = {
    f"mixer.{name.removeprefix('mamba.')}": stored for name, stored in MAMBA_NAMES.items() if "mamba" in name
}
NEMOTRON_H = {
    "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
    "conv_kernel": 4,
}  # fmt: skip
STATES_ALONE = {  # of models without attention, of which SIZES are not
    "intermediate_size": 128, "num_attention_heads": None, "num_key_value_heads": None, "state_size": 16,
}  # fmt: skip
STATES_ALONE_META = {
    "attention.head_count": 0, "feed_forward_length": 0, "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4,
}  # fmt: skip
SCAN_NAMES = {"mixer.A_log": "ssm_a", "mixer.D": "ssm_d"}
GRANITE_META = {"attention.scale": 0.125, "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}


@dataclass(frozen=True)
class Case:
    model: str  # transformers' type
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the config
    meta: Mapping[str, Any] = field(default_factory=dict)  # keys that are not in KEYS
    names: Mapping[str, str] = field(default_factory=dict)  # names of tensors that gguf's map does not have
    deviation: float = 0.15  # standard deviation of the random weights
    pairs: bool = False  # queries and keys are written as rotary pairs
    plus: float = 0.0  # is added to the weights of norms
    transposed: bool = False  # transformers' matrices of layers are [inputs, outputs]
    # Numbers by which the conversion multiplies weights: one, or one for each row
    scales: Mapping[str, float | NDArray[np.float32]] = field(default_factory=dict)
    by_head: bool = False  # transformers has the queries, keys and values of one head after the other
    joint: bool = False  # queries, keys and values are one tensor
    # Tensors that the model does not have
    tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


CASES = {  # by llama.cpp's name, the first word of the key
    "llama with experts": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, pairs=True),
    "internlm2": Case("llama", pairs=True),
    "exaone": Case("llama"),
    "arcee": Case("arcee", pairs=True),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4}, pairs=True),
    "mistral3": Case(
        "ministral3",
        {"head_dim": 32, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
                                             "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0}},
        {**YARN_META, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
        pairs=True,
    ),
    "ernie4_5": Case("ernie4_5", {"head_dim": 32}),
    "seed_oss": Case("seed_oss", {"head_dim": 32, "attention_bias": True}),
    "hunyuan-dense": Case("hunyuan_v1_dense", {"head_dim": 32, "rope_parameters": PLAIN}),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "head_dim": 16, "rope_parameters": PLAIN},
        {"expert_used_count": 2, "expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96,
         "expert_shared_count": 1},
        {"mlp.gate.wg.weight": "ffn_gate_inp.weight",
         **{f"mlp.shared_mlp.{x}_proj.weight": f"ffn_{x}_shexp.weight" for x in ("gate", "up", "down")}},
    ),
    "exaone4": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4 of 64 layers": Case(  # llama.cpp knows the windows of this size alone
        "exaone4",
        {"sliding_window": 24, "num_hidden_layers": 64,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
        {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, True, True, False] * 16},
    ),
    "olmo": Case("olmo", {"clip_qkv": 0.5}, {"attention.clamp_kqv": 0.5, "attention.layer_norm_epsilon": 1e-5},
                 pairs=True),
    "olmo2": Case("olmo3", {**WINDOWS, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
                  {**SLIDING, **YARN_META}),
    "olmoe": Case("olmoe", {**EXPERTS, "num_key_value_heads": 4, "norm_topk_prob": False}),
    "qwen2vl": Case("qwen2", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen2moe": Case(
        "qwen2_moe",
        {**SMALL_EXPERTS, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
        {"expert_shared_feed_forward_length": 32},
    ),
    "qwen3": Case("qwen3", {"head_dim": 32, "rope_parameters": YARN}, YARN_META),
    "qwen3vl": Case("qwen3", {"head_dim": 16}, {"rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen3vlmoe": Case("qwen3_moe", {**SMALL_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
                       {"rope.dimension_sections": [3, 3, 2, 0]}),
    "minimax-m2": Case(
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rope_parameters": HALF},
        {"expert_feed_forward_length": 96, "rope.dimension_count": 16, "expert_gating_func": SIGMOID},
        {"mlp.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "glm4": Case("glm4", {"head_dim": 32, "attention_bias": True, "rope_parameters": HALF},
                 {"rope.dimension_count": 16}),
    "glm4moe": Case(
        "glm4_moe",
        {**ROUTED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "rope_parameters": HALF},
        {**SCALED, "rope.dimension_count": 8},
        {"post_attention_layernorm": "post_attention_norm"},
    ),
    "dots1": Case("dots1", {**ROUTED, "head_dim": 16, "num_key_value_heads": 4}, SCALED),
    "ernie4_5-moe": Case(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "moe_layer_interval": 1, "num_hidden_layers": 2, "moe_layer_end_index": 1},
        {"expert_shared_count": 1, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1,
         "expert_shared_feed_forward_length": 32},
        {"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "granitemoe": Case(
        "granitemoe", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}, GRANITE_META, GRANITE_NAMES,
        pairs=True,
    ),
    "granitemoe with shared experts": Case(
        "granitemoeshared",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
        {**GRANITE_META, "expert_shared_feed_forward_length": 64}, GRANITE_NAMES, pairs=True,
    ),
    "granitehybrid": Case(
        "granitemoehybrid",
        {**GRANITE, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96},
        {**GRANITE_META, **MAMBA_META, "rope.scaling.finetuned": False, "attention.head_count_kv": [0, 2],
         "expert_count": 0, "expert_used_count": 0},
        MAMBA_NAMES, pairs=True,
    ),
    "granitehybrid with experts": Case(
        "granitemoehybrid",
        {**GRANITE, **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
         "position_embedding_type": "rope"},
        {**GRANITE_META, **MAMBA_META, "rope.scaling.finetuned": True, "attention.head_count_kv": [0, 2],
         "expert_shared_feed_forward_length": 64},
        {**MAMBA_NAMES, **GRANITE_NAMES}, pairs=True,
    ),
    "minicpm": Case(
        "granite",
        {**GRANITE, "attention_multiplier": 0.25},
        {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0},
        pairs=True,
    ),
    "phi3 with long and short factors": Case(
        "phi3",
        {"rope_parameters": {**HALF, "rope_type": "longrope", "long_factor": [1.0, 2.0, 3.0, 4.0],
                             "short_factor": [1.0, 1.5, 2.0, 2.5], "original_max_position_embeddings": 32},
         "original_max_position_embeddings": 32, "sliding_window": None},
        {"rope.dimension_count": 8, "rope.scaling.original_context_length": 32, "attention.sliding_window": 0,
         "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / 32) / math.log(32))},
        tensors={"rope_factors_long.weight": np.arange(1, 5, dtype=np.float32),
                 "rope_factors_short.weight": np.arange(2, 6, dtype=np.float32) / 2},
    ),
    "chatglm": Case("glm", GLM, {"rope.dimension_count": 8}),
    "chatglm with joint queries, keys and values": Case("glm", GLM, {"rope.dimension_count": 8}, joint=True),
    "phi2": Case("phi", {"rope_parameters": HALF, "num_key_value_heads": 4}, {"rope.dimension_count": 8}),
    "stablelm": Case("stablelm", {"use_qkv_bias": True, "rope_parameters": HALF},
                     {"rope.dimension_count": 8, "use_parallel_residual": False}),
    "starcoder2": Case("starcoder2", {"sliding_window": None}),
    "nemotron": Case("nemotron", {"rope_parameters": HALF, "norm_eps": 1e-5},
                     {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5}, plus=1.0),
    "jais2": Case("jais2", {}, {"rope.dimension_count": 16}),
    "apertus": Case("apertus", {"rope_parameters": PLAIN}, {"rope.dimension_count": 16}),
    "afmoe": Case(
        "afmoe",
        {**WINDOWS, **SMALL_EXPERTS, "head_dim": 16, "num_shared_experts": 2, "num_dense_layers": 1,
         "route_scale": 1.5, "mup_enabled": True},
        {"attention.sliding_window": 24, "expert_shared_count": 2, "leading_dense_block_count": 1,
         "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": SIGMOID},
        {"mlp.expert_bias": "exp_probs_b.bias"},
    ),
    "exaone-moe": Case(
        "exaone_moe",
        {**WINDOWS, **SMALL_EXPERTS, "head_dim": 16, "num_shared_experts": 1, "first_k_dense_replace": 1,
         "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        {**SLIDING, **SCALED, "expert_shared_feed_forward_length": 32, "rope.scaling.type": "none"},
    ),
    "nemotron_h": Case(
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3},
        {**MAMBA_META, "ssm.group_count": 2, "attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 96],
         "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 0, "expert_used_count": 0},
        MIXER_NAMES,
    ),
    "nemotron_h_moe": Case(
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "moe"], "num_hidden_layers": 3,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
         "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32, "routed_scaling_factor": 1.5,
         "norm_topk_prob": True},
        {**MAMBA_META, "ssm.group_count": 2, "attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 32],
         "attention.layer_norm_rms_epsilon": 1e-5, "expert_shared_count": 1, "expert_shared_feed_forward_length": 64,
         "expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_group_count": 1, "moe_latent_size": 32},
        {**MIXER_NAMES, **{f"mixer.experts.{x}_proj.weight": f"ffn_{x}_exps.weight" for x in ("up", "down")}},
    ),
    "falcon-h1": Case(
        "falcon_h1", FALCON_H1,
        {**MAMBA_META, "ssm.group_count": 2, "attention.key_length": 16, "attention.value_length": 16}, MAMBA_NAMES,
        scales=FALCON_H1_SCALES,
    ),
    "kimi-linear": Case(
        "kimi_linear",
        {**{key: x for key, x in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
         "num_local_experts": 4, "routed_scaling_factor": 1.5, "linear_head_dim": 16, "linear_num_heads": 4,
         "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
        {**HALVES, **SCALED, "attention.head_count_kv": [0, 1], "kda.head_dim": 16, "ssm.conv_kernel": 4},
        {"self_attn.forget_gate.A_log": "ssm_a", "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
         **{f"self_attn.forget_gate.f_{x}_proj.weight": f"ssm_f_{x}.weight" for x in "ab"},
         **{f"self_attn.conv1d_{x}.weight": f"ssm_conv1d_{x}.weight" for x in "qkv"}},
    ),
    "command-r": Case("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}, {"logit_scale": 0.25}),
    "command-r of 64 layers": Case(  # llama.cpp knows the norms of queries of this size alone
        "cohere",
        {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True, "num_hidden_layers": 64},
        {"logit_scale": 0.25},
    ),
    "gpt2": Case("gpt2", {"n_inner": 96, "num_key_value_heads": 4}, transposed=True),
    "starcoder": Case("gpt_bigcode", {"n_inner": 96}, {"attention.head_count_kv": 1}),
    "gptneox": Case("gpt_neox", {"num_key_value_heads": 4, "rope_parameters": HALF},
                    {"rope.dimension_count": 8, "use_parallel_residual": True}, by_head=True),
    "deepseek2": Case(
        "deepseek_v3",
        {**LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
         "rope_parameters": LATENT_YARN},
        {**HALVES, **SCALED, **YARN_META, "attention.q_lora_rank": 32, "expert_group_count": 2,
         "expert_group_used_count": 1, "rope.scaling.yarn_log_multiplier": 0.0707},
    ),
    "deepseek2 in one matrix": Case(
        "deepseek_v3",
        {**LATENT, "q_lora_rank": 32, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
        {**LATENT_META, **SCALED, "attention.key_length": 48, "attention.value_length": 32,
         "attention.q_lora_rank": 32},
    ),
    "deepseek2 of 27 layers": Case(  # the size of DeepSeek V2 Lite, whose queries have no latent vectors
        "deepseek_v2",
        {**LATENT, "num_hidden_layers": 27, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
         "rope_parameters": LATENT_YARN},
        {**HALVES, **YARN_META, "expert_weights_scale": 1.0, "rope.scaling.yarn_log_multiplier": 0.0707},
    ),
    "gemma3n": Case(  # llama.cpp fixes some sizes. Layers from the 21st on read the keys of the 19th and the 20th.
        "gemma3n_text",
        {"head_dim": 16, "num_hidden_layers": 25, "num_kv_shared_layers": 5, "sliding_window": 24, "laurel_rank": 64,
         "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 64, "tie_word_embeddings": True,
         "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
         "rope_parameters": {"sliding_attention": PLAIN, "full_attention": {**PLAIN, "rope_theta": 1e6}}},
        {"attention.sliding_window": 24, "attention.sliding_window_pattern": [*[True] * 4, False] * 5,
         "attention.shared_kv_layers": 5, "embedding_length_per_layer_input": 256, "altup.active_idx": 0,
         "altup.num_inputs": 4, "activation_sparsity_scale": [*[1.6448535] * 10, *[-math.inf] * 15]},
        {"altup.correct_output_scale": "altup_correct_scale.weight",
         **{f"model.{name}.{i}.weight": f"{stored}.{i}" for i in range(3) for name, stored in
            (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj"))}},
        # Files have keys and values of the layers that read those of others.
        tensors={f"blk.{i}.attn_{name}.weight": np.ones(shape, np.float32) for i in range(20, 25)
                 for name, shape in (("k", (32, 64)), ("v", (32, 64)), ("k_norm", (16,)))},
        deviation=0.015,  # 25 layers of larger weights amplify the rounding of llama.cpp's GELU
    ),
    "gemma4": Case(  # as E2B: embeddings for each layer, and layers that read another layer's cache
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 3,
         "use_double_wide_mlp": True},
        {**GEMMA4_META, "embedding_length_per_layer_input": 32, "attention.shared_kv_layers": 3,
         "feed_forward_length": [96] * 3 + [192] * 3},
        GEMMA4_NAMES,
        tensors={"rope_freqs.weight": ROTATED_QUARTER},
    ),
    "gemma4 with experts": Case(  # as 26B A4B
        "gemma4_text",
        {**GEMMA4, "num_hidden_layers": 3, "layer_types": GEMMA4["layer_types"][:3], "hidden_size_per_layer_input": 0,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        {**GEMMA4_META, "embedding_length_per_layer_input": 0, "attention.head_count_kv": [2, 2, 1],
         "attention.sliding_window_pattern": [True, True, False],
         "expert_used_count": 2},
        GEMMA4_NAMES,
        tensors={"rope_freqs.weight": ROTATED_QUARTER},
    ),
    "cohere2": Case("cohere2", {**WINDOWS, "logit_scale": 0.25, "tie_word_embeddings": True},
                    {**SLIDING, "logit_scale": 0.25}),
    "lfm2moe": Case(
        "lfm2_moe",
        {**SMALL_EXPERTS, "tie_word_embeddings": True, "layer_types": ["conv", "full_attention"],
         "num_dense_layers": 1, "conv_L_cache": 3},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "leading_dense_block_count": 1,
         "expert_gating_func": SIGMOID, "attention.layer_norm_rms_epsilon": 1e-5},
        {"feed_forward.expert_bias": "exp_probs_b.bias"},
    ),
    "mamba": Case("mamba", {**STATES_ALONE, "tie_word_embeddings": True}, STATES_ALONE_META, SCAN_NAMES),
    "mamba with norms of B and C": Case(  # llama.cpp adds the same number to the variance in these norms as in others
        "falcon_mamba",
        {**STATES_ALONE, "layer_norm_epsilon": 1e-6},
        {**STATES_ALONE_META, "attention.layer_norm_rms_epsilon": 1e-6, "ssm.dt_b_c_rms": True},
        SCAN_NAMES,
    ),
    "mamba2": Case(
        "mamba2",
        {**STATES_ALONE, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 16},
        {**STATES_ALONE_META, "ssm.group_count": 2},
        MIXER_NAMES,
    ),
    "gemma": Case("gemma", {"head_dim": 32, "tie_word_embeddings": True}, plus=1.0),
}  # fmt: skip


def described(kind: str, case: Case, config: Any) -> dict[str, Any]:
    config.allow_global_per_layer_attribute_access = True  # the heads of Gemma 4 differ by layer
    sizes = {
        key: value
        for key, names in KEYS.items()
        if (value := next((x for name in names if (x := getattr(config, name, None)) is not None), None)) is not None
    }
    rope = getattr(config, "rope_parameters", None) or PLAIN
    rope = rope.get("full_attention", rope)
    texts = {
        "model": "gpt2", "pre": "smollm", "tokens": ["<|end|>", "a", "b", "ab", *map(chr, range(99, 159))],
        "token_type": [3] + [1] * 63, "merges": ["a b"], "eos_token_id": 0, "bos_token_id": 0, "padding_token_id": 0,
    }  # fmt: skip
    return {
        "general.architecture": kind,
        **{f"{kind}.{key}": x for key, x in {**sizes, "rope.freq_base": rope["rope_theta"], **case.meta}.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in texts.items()},
    }


def write_decoder(kind: str, file: Path, *, packed: bool = True) -> Any:
    """Write the decoder of CASES[kind] as a GGUF file, and return transformers' model with the values of the file."""
    import gguf as package

    case, kind = CASES[kind], kind.split()[0]
    config = AutoConfig.for_model(case.model, **{**SIZES, **case.changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    architecture = next(x for x, name in package.MODEL_ARCH_NAMES.items() if name == kind)
    mapped = package.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors: Tensors = {name: (x.shape[::-1], F32, x.tobytes()) for name, x in case.tensors.items()}

    def put(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Store the values under transformers' `name`, and return the values that are stored."""
        name = name.replace("gate.e_score_correction_bias", "gate.e_score_correction.bias")
        layer, own = layer_and_own(name)
        if own in case.names:
            stored = f"{f'blk.{layer}.' if layer else ''}{case.names[own]}"
        else:  # the files of Nemotron-H have another prefix than transformers' model
            prefixed = (name, name.replace("model.", "backbone.", 1))
            stored = next(x for each in prefixed if (x := mapped.get_name(each, (".weight", ".bias"))))
        scale = case.scales.get(own, np.float32(1))
        in_file = values * scale + np.float32(case.plus if name.endswith("norm.weight") else 0)
        kind_of_tensor, data, held = F32, in_file.tobytes(), in_file
        is_matrix = in_file.ndim > 1 and in_file.shape[-1] % 32 == 0 and not own.endswith("norm.weight")
        if packed and is_matrix and "ffn_gate_inp" not in stored:
            kind_of_tensor, (data, held) = Q8_0, q8_0(in_file)
        if case.pairs and own.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in own else config.num_key_value_heads
            rows = np.frombuffer(data, np.uint8).reshape(heads, 2, len(values) // heads // 2, -1)
            data = rows.swapaxes(1, 2).tobytes()
        convolution = own in ("conv.conv.weight", "mamba.conv1d.weight", "mixer.conv1d.weight")
        shape = (values.shape[0], values.shape[2]) if convolution else values.shape
        tensors[stored] = (shape[::-1], kind_of_tensor, data)
        return (held - np.float32(case.plus if name.endswith("norm.weight") else 0)) / scale

    def rearranged(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Store the values as the conversion rearranges them, and return the values that are stored."""
        layer, own = layer_and_own(name)
        heads = config.num_attention_heads
        if own == "self_attn.kv_b_proj.weight" and "attention.key_length_mla" in case.meta:
            keys, both = config.qk_nope_head_dim, values.reshape(heads, -1, values.shape[1])
            turned = put(name.replace("kv_b", "k_b"), np.ascontiguousarray(both[:, :keys].swapaxes(1, 2)))
            rest = put(name.replace("kv_b", "v_b"), np.ascontiguousarray(both[:, keys:]))
            return np.concatenate([turned.swapaxes(1, 2), rest], 1).reshape(values.shape)
        if own == "shared_mlp.input_linear.weight":
            stem = name.removesuffix("input_linear.weight")
            gate, up = np.split(values, 2)
            return np.concatenate([put(f"{stem}gate.weight", gate), put(f"{stem}up.weight", up)])
        if own.endswith("A_log"):
            return np.log(-put(name, -np.exp(values if values.ndim > 1 else values[:, None]))).reshape(values.shape)
        if own.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")) and "ssm.group_count" in case.meta:
            rows = -1 if own.endswith(".D") else case.meta["ssm.group_count"]
            return put(name, values.reshape(rows, 1 if rows < 0 else -1)).reshape(-1)
        if own == "self_attn.conv1d.weight":
            parts = zip("qkv", np.split(values[None, :, 0, None], 3, axis=1), strict=True)
            stem = name.removesuffix(".weight")
            return np.concatenate([put(f"{stem}_{x}.weight", part) for x, part in parts], 1).reshape(values.shape)
        if own.startswith("mlp.act_fn."):
            numbers.setdefault(f"xielu.{own.removeprefix('mlp.act_fn.')}", []).append(values.item())
            return values
        if case.transposed and layer and values.ndim == 2:
            return put(name, np.ascontiguousarray(values.T)).T
        if case.by_head and "query_key_value" in own:
            split = values.reshape(heads, 3, -1, *values.shape[1:])
            held = put(name, np.ascontiguousarray(split.swapaxes(0, 1)).reshape(values.shape))
            return held.reshape(3, heads, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        return put(name, values)

    numbers: dict[str, list[float]] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = tensor.float().numpy()
            if tensor.ndim:
                values = (
                    (torch.randn_like(tensor) * case.deviation + (0 if tensor.ndim > 1 else tensor)).float().numpy()
                )
            if name.endswith("experts.gate_up_proj") and "experts.gate_up_proj" not in case.names:
                stem = name.removesuffix("gate_up_proj")
                halves = np.split(values, 2, axis=1)
                parts = zip(("gate_proj.weight", "up_proj.weight"), halves, strict=True)
                values = np.concatenate([put(stem + part, np.ascontiguousarray(half)) for part, half in parts], axis=1)
            else:
                bare = name.endswith(("experts.up_proj", "experts.down_proj"))
                values = rearranged(f"{name}.weight" if bare else name, values)
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(tensor.shape))
    if case.joint:
        for first in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(first.replace("attn_q", f"attn_{x}")) for x in "qkv"]
            dims = (*parts[0][0][:-1], sum(dims[-1] for dims, _, _ in parts))
            data = b"".join(data for _, _, data in parts)
            tensors[first.replace("attn_q", "attn_qkv")] = (dims, parts[0][1], data)
    for first in [name for name in tensors if name.endswith(".0")]:
        parts = [tensors.pop(f"{first[:-1]}{i}") for i in range(3)]
        data = b"".join(data for _, _, data in parts)
        tensors[f"{first[:-1]}weight"] = ((*parts[0][0], 3), parts[0][1], data)
    metadata = {**described(kind, case, config), **numbers}
    file.write_bytes(gguf({key: entry(value) for key, value in metadata.items()}, tensors))
    return model


def layer_and_own(name: str) -> tuple[str, str]:
    """Return the number of a parameter's layer, "" if it has none, and its name in the layer."""
    match = re.fullmatch(r"(?:(?:model|backbone|gpt_neox)\.layers|transformer\.h)\.(\d+)\.(.+)", name)
    return (match[1], match[2]) if match else ("", name)


def text(count: int = LENGTH) -> list[int]:
    return np.random.default_rng(1).integers(1, SIZES["vocab_size"], count).tolist()
