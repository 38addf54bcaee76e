"""Tiny random decoders of many types in GGUF files, as llama.cpp's conversion writes them.

The names of tensors are those of the package gguf (`gguf.get_tensor_name_map`); `CASES` says what else the conversion
changes. Source: llama.cpp's folder conversion/.
"""

from __future__ import annotations

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
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon"),
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
GRANITE_META = {"attention.scale": 0.125, "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}


@dataclass(frozen=True)
class Case:
    model: str  # transformers' type
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the config
    meta: Mapping[str, Any] = field(default_factory=dict)  # keys that are not in KEYS
    names: Mapping[str, str] = field(default_factory=dict)  # names of tensors that gguf's map does not have
    pairs: bool = False  # queries and keys are written as rotary pairs
    plus: float = 0.0  # is added to the weights of norms


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
        "granitemoe", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}, GRANITE_META,
        {"block_sparse_moe.router.weight": "ffn_gate_inp.weight",
         **{f"block_sparse_moe.experts.{x}_proj.weight": f"ffn_{x}_exps.weight" for x in ("gate", "up", "down")}},
        pairs=True,
    ),
    "phi2": Case("phi", {"rope_parameters": HALF, "num_key_value_heads": 4}, {"rope.dimension_count": 8}),
    "stablelm": Case("stablelm", {"use_qkv_bias": True, "rope_parameters": HALF},
                     {"rope.dimension_count": 8, "use_parallel_residual": False}),
    "starcoder2": Case("starcoder2", {"sliding_window": None}),
    "nemotron": Case("nemotron", {"rope_parameters": HALF, "norm_eps": 1e-5},
                     {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5}, plus=1.0),
    "command-r": Case("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}, {"logit_scale": 0.25}),
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
    "gemma": Case("gemma", {"head_dim": 32, "tie_word_embeddings": True}, plus=1.0),
}  # fmt: skip


def described(kind: str, case: Case, config: Any) -> dict[str, Any]:
    sizes = {
        key: value
        for key, names in KEYS.items()
        if (value := next((x for name in names if (x := getattr(config, name, None)) is not None), None)) is not None
    }
    rope = config.rope_parameters
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
    """Write the decoder of CASES[kind] as a GGUF file, and return transformers' model with the values of the file.

    Its weights are random. The file's matrices are Q8_0, or F32 if not `packed`.
    """
    import gguf as package

    case, kind = CASES[kind], kind.split()[0]
    config = AutoConfig.for_model(case.model, **{**SIZES, **case.changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    architecture = next(x for x, name in package.MODEL_ARCH_NAMES.items() if name == kind)
    mapped = package.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors: Tensors = {}

    def put(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Store the values under transformers' `name`, and return the values that are stored."""
        name = name.replace("gate.e_score_correction_bias", "gate.e_score_correction.bias")
        layer, own = name.split(".", 3)[2:] if name.startswith("model.layers.") else ("", name)
        stored = f"blk.{layer}.{case.names[own]}" if own in case.names else mapped.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        in_file = values + np.float32(case.plus) if name.endswith("norm.weight") else values
        kind_of_tensor, data, held = F32, in_file.tobytes(), in_file
        if packed and in_file.ndim > 1 and in_file.shape[-1] % 32 == 0 and "ffn_gate_inp" not in stored:
            kind_of_tensor, (data, held) = Q8_0, q8_0(in_file)
        if case.pairs and own.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in own else config.num_key_value_heads
            rows = np.frombuffer(data, np.uint8).reshape(heads, 2, len(values) // heads // 2, -1)
            data = rows.swapaxes(1, 2).tobytes()
        shape = (values.shape[0], values.shape[2]) if own == "conv.conv.weight" else values.shape
        tensors[stored] = (shape[::-1], kind_of_tensor, data)
        return held - np.float32(case.plus) if name.endswith("norm.weight") else held

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = (torch.randn_like(tensor) * 0.15 + (0 if tensor.ndim > 1 else tensor)).numpy()
            if name.endswith("experts.gate_up_proj"):
                stem = name.removesuffix("gate_up_proj")
                halves = np.split(values, 2, axis=1)
                parts = zip(("gate_proj.weight", "up_proj.weight"), halves, strict=True)
                values = np.concatenate([put(stem + part, np.ascontiguousarray(half)) for part, half in parts], axis=1)
            else:
                values = put(f"{name}.weight" if name.endswith("experts.down_proj") else name, values)
            tensor.copy_(torch.from_numpy(values))
    file.write_bytes(gguf({key: entry(value) for key, value in described(kind, case, config).items()}, tensors))
    return model


def text(count: int = LENGTH) -> list[int]:
    return np.random.default_rng(1).integers(1, SIZES["vocab_size"], count).tolist()
