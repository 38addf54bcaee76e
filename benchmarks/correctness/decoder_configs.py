"""Tiny configs of the decoder types of transformers, for `decoder_types.py`."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

WINDOW = 24
# Sizes of a config, for each field that its class has, in nested configs too.
SIZES: dict[str, Any] = {
    "vocab_size": 100, "vocab_size_per_layer_input": 100, "hidden_size": 64, "n_embd": 64, "d_model": 64,
    "embed_dim": 64, "word_embed_proj_dim": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96,
    "ffn_hidden_size": 96, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "multi_query_group_num": 2, "head_dim": 16, "global_head_dim": 16, "kv_channels": 16,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "sliding_window": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "top_k_experts": 2, "moe_topk": 2, "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48, "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    "n_group": 1, "num_expert_group": 1, "topk_group": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "depth": 2,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "query_pre_attn_scalar": 16, "rotary_dim": 8,
    "attn_logit_softcapping": 5.0, "altup_num_inputs": 2, "laurel_rank": 8, "mlp_only_layers": [],
    "image_token_id": 99, "video_token_id": 98, "image_token_index": 99, "vision_start_token_id": 97,
    "vision_end_token_id": 96, "projection_dim": 64, "out_hidden_size": 64, "text_hidden_size": 64,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
SHARED_CACHES = {  # the last two of four layers read the caches of the first two
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
# Further fields of types whose classes fail with `SIZES` alone, or would have one kind of layer.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bitnet": {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}},  # as published
    "chameleon": {"vocabulary_map": {"<image>": 99}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]}},
    "gemma3n_text": {"hidden_size_per_layer_input": 16, **SHARED_CACHES},
    "gemma4_text": {"hidden_size_per_layer_input": 16, **SHARED_CACHES},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]}},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granite4_vision": {"deepstack_layer_map": []},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_vl_text": {"rope_parameters": MROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "llama4_text": {
        "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"], "floor_scale": 16,
        "attn_scale": 0.5,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 32, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 16,
    },
    "mistral_large4_text": {"no_rope_layers": [1, 0]},
    "molmo2_adapter": {"vision_feature_layer": [0, 1]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16,
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 256,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": WINDOW},
    "reformer": {"is_decoder": True},
    "xlstm": {"hidden_size": 128, "chunk_size": 16},  # the cache of transformers takes no smaller sizes
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_ngroups": 2,
        "n_mamba_heads": 4, "mamba_d_state": 16, "chunk_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny(config_class: Any, depth: int = 0) -> dict[str, Any]:
    """Return the fields of a tiny config of a class, with the sizes that it and its nested configs know."""
    default = config_class().to_dict()
    # The default may differ from the type of the field: lists of layers follow the number of layers by themselves.
    fields = {name: value for name, value in SIZES.items() if name in default and not isinstance(default[name], list)}
    for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        if default.get(name) is not None:
            fields[name] = token
    if "kv_lora_rank" in fields:  # every head has a key of its own, whose sizes are those of its parts
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    for name in ("layer_types", "layers_block_type"):
        if isinstance(default.get(name), list):
            kinds = list(dict.fromkeys(default[name]))[:2]
            fields[name] = (kinds * 2)[:2]
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        if isinstance(default.get(name), dict) and depth < 2:
            kind = default[name].get("model_type")
            fields[name] = tiny(CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else nested, depth + 1)  # noqa: SIM401
            if kind:
                fields[name]["model_type"] = kind
    if (default.get("rope_parameters") or default.get("rope_scaling") or {}).get("mrope_section"):
        rope = dict(default.get("rope_parameters") or default["rope_scaling"])
        fields["rope_parameters"] = {**rope, "mrope_section": MROPE["mrope_section"]}
    return _joined(fields, FIELDS.get(config_class.model_type, {}))


def _joined(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with those of `more`, which may name fields of nested configs."""
    joined = dict(fields)
    for name, value in more.items():
        nested = isinstance(value, dict) and name.endswith("_config")
        joined[name] = _joined(joined.get(name) or {}, value) if nested else value
    return joined
