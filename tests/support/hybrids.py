"""Tiny configs of decoders with recurrent states, for tests."""

from typing import Any

import transformers as hf

from tests.support import models

SIZES: dict[str, Any] = {**models.SIZES, "num_hidden_layers": 3}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {
    "head_dim": 16, "layer_types": KINDS, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "lfm2": lambda: hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**SIZES, **DELTA),
    "bamba": lambda: hf.BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: hf.FalconH1Config(**SIZES, **MAMBA, head_dim=16, mamba_d_ssm=128),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **SIZES, **MAMBA, layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=96,
    ),
    "jamba": lambda: hf.JambaConfig(
        **SIZES, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8
    ),
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(**SIZES, lru_width=64),
    "zamba": lambda: hf.ZambaConfig(
        **{**SIZES, "num_hidden_layers": 4}, layers_block_type=["linear_attention", "hybrid"] * 2, mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "zamba2": lambda: hf.Zamba2Config(
        **{**SIZES, "num_hidden_layers": 4}, layers_block_type=["linear_attention", "hybrid"] * 2, n_mamba_heads=4,
        mamba_ngroups=2, mamba_d_state=16, chunk_size=16,
    ),
}  # fmt: skip
