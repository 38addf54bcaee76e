"""The architectures of GGUF files: llama.cpp's names of tensors and sizes, and transformers' names for them.

Source: llama.cpp's gguf-py/gguf/constants.py and convert_hf_to_gguf.py.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from kvexport.export.model.gguf import Gguf


def _table(text: str) -> dict[str, str]:
    """Parse "name mine, name mine": names on the left, what they map to on the right."""
    return dict(re.findall(r"([^\s,]+) ([^\s,]+)", text))


def _attention(prefix: str, output: str) -> dict[str, str]:
    names = {f"attn_{kind}": f"{prefix}.{kind}_proj" for kind in "qkv"}
    return {**names, "attn_output": f"{prefix}.{output}"}


def _mlp(prefix: str, ending: str = "") -> dict[str, str]:
    return {f"ffn_{kind}{ending}": f"{prefix}.{kind}_proj" for kind in ("gate", "up", "down")}


_EMBEDDED = _table("token_embd model.embed_tokens, output_norm model.norm, output lm_head, attn_norm input_layernorm")
_NAMES = {**_EMBEDDED, **_attention("self_attn", "o_proj"), "ffn_norm": "post_attention_layernorm"}
_MLP = _mlp("mlp")
_HEAD_NORMS = _table("attn_q_norm self_attn.q_norm, attn_k_norm self_attn.k_norm")
_FOUR_NORMS = _table(
    "post_attention_norm post_attention_layernorm, ffn_norm pre_feedforward_layernorm, "
    "post_ffw_norm post_feedforward_layernorm"
)
_CORRECTIONS = (
    *("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias", "mixer.gate.e_score_correction_bias"),
    *("feed_forward.expert_bias", "mlp.expert_bias"),
)
GATE_EXPERTS, UP_EXPERTS, DOWN_EXPERTS = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
GATE_UP_EXPERTS = "ffn_gate_up_exps"
EXPERTS = (GATE_EXPERTS, UP_EXPERTS, DOWN_EXPERTS, GATE_UP_EXPERTS)
"""llama.cpp's names of the tensors that have the matrices of all experts of a layer."""
KEY_EXPANSION, VALUE_EXPANSION = "attn_k_b", "attn_v_b"
"""llama.cpp's names of the halves of the matrix that expands latent vectors to the keys and values of all heads."""
BARE = (
    *("self_attn.sinks", "mlp.gate.moe_statics.e_score_correction_bias", *_CORRECTIONS),
    *("layer_scalar", "router.scale", "router.per_expert_scale", "altup.correct_output_scale"),
    *("mamba.dt_bias", "mamba.A_log", "mamba.D", "mixer.dt_bias", "mixer.A_log", "mixer.D"),
    *("self_attn.forget_gate.dt_bias", "self_attn.forget_gate.A_log"),
    "pre_ff_layernorm.weight",  # llama.cpp's name of this norm has no ending
)
"""Parameters of transformers that a GGUF file stores under a name without .weight or .bias, or that have no such name.
"""
SQUEEZED = ("conv.conv", "mamba.conv1d", "mixer.conv1d", "self_attn.conv1d")
"""Modules of transformers whose weight [channels, 1, taps] a GGUF file stores as [channels, taps]."""
STACKED = ("altup_proj", "altup_unembd_proj")
"""llama.cpp's names of tensors that have the matrices of a list of modules."""
ONE_ROW = ("mlp.shared_expert_gate", "mlp.gate.moe_statics.e_score_correction_bias")
"""Modules of transformers whose weight [1, inputs] a GGUF file may store as [inputs]."""


class Meta(dict[str, Any]):
    """Metadata of a GGUF file: the keys that begin with the architecture's name, without that name."""

    def __init__(self, kind: str, gguf: Gguf) -> None:
        prefix = f"{kind}."
        super().__init__({key.removeprefix(prefix): x for key, x in gguf.metadata.items() if key.startswith(prefix)})
        self._prefix, self.tensors = prefix, gguf.tensors

    def __missing__(self, key: str) -> Any:
        raise KeyError(self._prefix + key)


@dataclass(frozen=True)
class Architecture:
    model_type: str  # transformers' name
    names: Mapping[str, str]  # llama.cpp's names of tensors, without layer and ending -> transformers' names
    keys: Mapping[str, str] = field(default_factory=dict)  # entries of config.json -> keys of the metadata
    fixed: Mapping[str, Any] = field(default_factory=dict)  # entries of config.json that the metadata does not have
    # Entries of config.json that say whether there are such tensors -> the tensor's name in a layer
    present: Mapping[str, str] = field(default_factory=dict)
    norm: str = "rms_norm_eps"  # config.json's name of what norms add to the variance; empty if it has no such entry
    pairs: bool = False  # whether rows of query and key weights are stored as rotary pairs (2i, 2i + 1)
    # Whether the file stores the weights of norms plus 1 (the module of transformers adds the 1 itself)
    shifted: bool = False
    partial: bool = False  # whether config.json says which part of a head is rotated
    layers: str = "model.layers"  # transformers' name of the layers
    transposed: bool = False  # whether transformers' matrices of layers are [inputs, outputs]
    # Whether transformers has the queries, keys and values of one head after the other, and not all queries first
    by_head: bool = False
    # Parameters of a layer that are one number -> their shape. The metadata have the numbers of all layers.
    numbers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    linear: str = ""  # layout of linear attention's tensors (`gguf_linear_attention`); empty without such layers
    # A function from the metadata and the rotary settings to entries of config.json, in addition to or instead of those
    # that all architectures have
    config: Callable[[Meta, dict[str, Any]], dict[str, Any]] = lambda meta, rope: {}


def shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _windows(meta: Meta, _: Any = None) -> dict[str, Any]:
    """Return the layers with a sliding window: those that the metadata marks, or all but every fourth."""
    count, window = meta["block_count"] - meta.get("nextn_predict_layers", 0), meta.get("attention.sliding_window")
    pattern = meta.get("attention.sliding_window_pattern") or [bool((i + 1) % 4) for i in range(count)]
    kinds = ["sliding_attention" if window and slides else "full_attention" for slides in pattern[:count]]
    return {"sliding_window": window, "layer_types": kinds}


def _linear_attention(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    layers, every = range(meta["block_count"] - meta.get("nextn_predict_layers", 0)), meta["full_attention_interval"]
    sections = [size for size in meta.get("rope.dimension_sections", ()) if size]
    return {
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in layers],
        "linear_value_head_dim": meta["ssm.inner_size"] // meta["ssm.time_step_rank"],
        "rope_parameters": {**rope, **({"mrope_section": sections, "mrope_interleaved": True} if sections else {})},
    }


def _gpt_oss(meta: Meta, _: Any) -> dict[str, Any]:
    layers = range(meta["block_count"])
    return {"layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers]}


def _gemma2(meta: Meta, _: Any) -> dict[str, Any]:
    # llama.cpp scales queries by another number only in the 27B models, which have 46 and 62 layers.
    return {
        "query_pre_attn_scalar": _head_size(meta) if meta["block_count"] in (46, 62) else meta["attention.key_length"]
    }


def _gemma3(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    # Layers with a sliding window rotate by a base of 10,000, which GGUF files do not store.
    return {
        **_gemma2(meta, rope),
        "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(meta["block_count"])],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }


def _gemma4(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    sliding, heads = meta["attention.sliding_window_pattern"], meta["attention.head_count_kv"]
    inner = meta["feed_forward_length"]
    inner = inner if isinstance(inner, list) else [inner]
    of_full, of_sliding = (heads[sliding.index(kind)] if isinstance(heads, list) else heads for kind in (False, True))
    per_layer = meta.get("embedding_length_per_layer_input", 0)
    experts = meta.get("expert_count", 0)
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "sliding_window": meta["attention.sliding_window"],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": shortest(meta["rope.freq_base_swa"]), "rope_type": "default"},
        },
        "head_dim": meta["attention.key_length_swa"],
        "global_head_dim": meta["attention.key_length"],
        "num_key_value_heads": of_sliding,
        "num_global_key_value_heads": of_full,
        "attention_k_eq_v": f"blk.{sliding.index(False)}.attn_v.weight" not in meta.tensors,
        "num_kv_shared_layers": meta.get("attention.shared_kv_layers", 0),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": per_layer,
        **({"vocab_size_per_layer_input": meta.tensors["per_layer_token_embd.weight"].shape[0]} if per_layer else {}),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "enable_moe_block": experts > 0,
        **(
            {
                "num_experts": experts,
                "top_k_experts": meta["expert_used_count"],
                "moe_intermediate_size": meta["expert_feed_forward_length"],
            }
            if experts
            else {}
        ),
    }


def _gemma3n(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    sliding = {"rope_theta": shortest(meta.get("rope.freq_base_swa", 10000.0)), "rope_type": "default"}
    # The file has how many standard deviations above the mean an activation has to be, and config.json the share of
    # activations that are below.
    sparsity = [round(NormalDist().cdf(scale), 6) for scale in meta["activation_sparsity_scale"]]
    return {
        **_windows(meta),
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
        "vocab_size_per_layer_input": meta.tensors["per_layer_token_embd.weight"].shape[0],
        "laurel_rank": meta.tensors["blk.0.laurel_l.weight"].shape[0],
        "activation_sparsity_pattern": sparsity,
        "final_logit_softcapping": meta.get("final_logit_softcapping", 30.0),
    }


def _deepseek2(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    if "attention.temperature_scale" in meta:
        raise ValueError("attention.temperature_scale makes queries depend on their positions, as in Mistral Large 3")
    heads, rotated, layers = (meta[key] for key in ("attention.head_count", "rope.dimension_count", "block_count"))
    # Files of 2025 and later have the sizes of latent vectors as those of keys and values, and the sizes below beside.
    key, value = (
        meta.get(f"attention.{name}_length_mla") or meta[f"attention.{name}_length"] for name in ("key", "value")
    )
    experts, groups = meta.get("expert_count", 0), meta.get("expert_group_count") or 1
    sigmoid = not experts or meta.get("expert_gating_func") == _SIGMOID
    if not sigmoid and meta.get("expert_weights_norm"):
        raise ValueError("expert_weights_norm normalizes a softmax over experts, which no DeepSeek V2 does")
    if rope["rope_type"] == "yarn":
        scale = shortest(10 * meta["rope.scaling.yarn_log_multiplier"])
        rope = {**rope, "mscale": scale, "mscale_all_dim": scale}
    return {
        **({} if sigmoid else {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}),
        "rope_parameters": rope,
        "head_dim": rotated,
        "num_key_value_heads": heads,
        "q_lora_rank": meta.get("attention.q_lora_rank"),
        "kv_lora_rank": meta["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "n_shared_experts": meta.get("expert_shared_count", 0),
        "num_experts_per_tok": meta.get("expert_used_count", 0),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0) if experts else layers,
        "moe_intermediate_size": meta.get("expert_feed_forward_length", 0),
        "norm_topk_prob": bool(meta.get("expert_weights_norm")),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": meta.get("expert_group_used_count") or groups,
    }


def _granitehybrid(meta: Meta, _: Any) -> dict[str, Any]:
    heads, inner = meta["attention.head_count_kv"], meta["ssm.inner_size"]
    return {
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "num_key_value_heads": max(heads),
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned") else None,
        "num_local_experts": meta.get("expert_count", 0),
        "num_experts_per_tok": meta.get("expert_used_count", 0),
        "shared_intermediate_size": meta.get("expert_shared_feed_forward_length") or meta["feed_forward_length"],
        "mamba_n_heads": meta["ssm.time_step_rank"],
        "mamba_d_head": inner // meta["ssm.time_step_rank"],
        "mamba_expand": inner // meta["embedding_length"],
    }


def _falcon_h1(meta: Meta, _: Any) -> dict[str, Any]:
    return {"mamba_d_head": meta["ssm.inner_size"] // meta["ssm.time_step_rank"]}


def _mamba(meta: Meta, _: Any) -> dict[str, Any]:
    normalized = {"model_type": "falcon_mamba"} if meta.get("ssm.dt_b_c_rms") else {}
    return {**normalized, "expand": meta["ssm.inner_size"] // meta["embedding_length"]}


def _mamba2(meta: Meta, _: Any) -> dict[str, Any]:
    inner = meta["ssm.inner_size"]
    return {"expand": inner // meta["embedding_length"], "head_dim": inner // meta["ssm.time_step_rank"]}


def _nemotron_h(meta: Meta, _: Any) -> dict[str, Any]:
    heads, inner = meta["attention.head_count_kv"], meta["feed_forward_length"]  # 0 in a layer that has none
    experts = meta.get("expert_count", 0)
    rest = ["moe" if experts and size else "mlp" if size else "linear_attention" for size in inner]
    layers = range(meta["block_count"] - meta.get("nextn_predict_layers", 0))
    return {
        "layers_block_type": ["full_attention" if heads[i] else rest[i] for i in layers],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(inner),
        "mamba_head_dim": meta["ssm.inner_size"] // meta["ssm.time_step_rank"],
        **({name: meta[key] for name, key in _NEMOTRON_EXPERTS.items()} if experts else {}),
        "moe_latent_size": meta.get("moe_latent_size"),
    }


def _kimi_linear(meta: Meta, _: Any) -> dict[str, Any]:
    heads, rotated = meta["attention.head_count"], meta["rope.dimension_count"]
    dense = meta.get("leading_dense_block_count", 0)
    return {
        "layer_types": ["full_attention" if count else "linear_attention" for count in meta["attention.head_count_kv"]],
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(meta["block_count"])],
        "num_key_value_heads": heads,
        "linear_num_heads": heads,
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": meta["attention.key_length_mla"] - rotated,
        "q_lora_rank": meta.get("attention.q_lora_rank"),
    }


def _granitemoe(meta: Meta, _: Any) -> dict[str, Any]:
    shared = meta.get("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}


def _head_size(meta: Meta) -> int:
    return int(meta["embedding_length"] // meta["attention.head_count"])


def _phi3(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings")
    more = {"original_max_position_embeddings": original} if original else {}
    return {"sliding_window": meta.get("attention.sliding_window") or None, **more}


def _glm4(meta: Meta, _: Any) -> dict[str, Any]:
    if any(meta.get("rope.dimension_sections", ())):
        raise ValueError("a GLM with images stores its queries and keys in another order")
    return {}


def _lfm2(meta: Meta, _: Any) -> dict[str, Any]:
    heads = meta["attention.head_count_kv"]  # one number for each layer, 0 for a convolution
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }


def _mistral3(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    if "attention.temperature_scale" not in meta:  # Mistral Small 3, whose decoder is a Llama
        return {"model_type": "llama"}
    beta, scale = (shortest(meta[key]) for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"))
    return {"rope_parameters": {**rope, "llama_4_scaling_beta": beta, "mscale": 1.0, "mscale_all_dim": scale}}


def _olmo2(meta: Meta, rope: dict[str, Any]) -> dict[str, Any]:
    if "attention.sliding_window" not in meta:
        return {}
    sliding = {"rope_theta": rope["rope_theta"], "rope_type": "default"}
    ropes = {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}
    return {"model_type": "olmo3", **_windows(meta), **ropes}


def _without(names: Mapping[str, str], *left_out: str) -> dict[str, str]:
    return {name: mine for name, mine in names.items() if name not in left_out}


_LLAMA = {**_NAMES, **_MLP}
_UP_DOWN = _table("ffn_up mlp.up_proj, ffn_down mlp.down_proj")
_GATE_UP_DOWN = _table("ffn_up mlp.gate_up_proj, ffn_down mlp.down_proj")
_ROUTED = {"ffn_gate_inp": "mlp.gate", **dict.fromkeys(EXPERTS, "mlp.experts")}
_SECOND_NORM = {**_without(_NAMES, "ffn_norm"), "post_attention_norm": "post_attention_layernorm"}
_NORMS_BEHIND = {
    **_without(_LLAMA, "attn_norm", "ffn_norm"),
    **_HEAD_NORMS,
    **_table("post_attention_norm post_attention_layernorm, post_ffw_norm post_feedforward_layernorm"),
}
_SHARED_EXPERT = {
    **_ROUTED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_mlp("mlp.shared_expert", "_shexp")
}  # fmt: skip
_SHARED_EXPERTS = {
    **_ROUTED,
    **_MLP,  # of the first layers
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **_mlp("mlp.shared_experts", "_shexp"),
}
_SIGMOID = 2  # llama.cpp's number of a function that scores experts
_LATENT = {
    **_without(_NAMES, "attn_k", "attn_v"),
    **_table(
        "attn_q_a self_attn.q_a_proj, attn_q_a_norm self_attn.q_a_layernorm, attn_q_b self_attn.q_b_proj, "
        "attn_kv_a_mqa self_attn.kv_a_proj_with_mqa, attn_kv_a_norm self_attn.kv_a_layernorm"
    ),
    **dict.fromkeys(("attn_kv_b", KEY_EXPANSION, VALUE_EXPANSION), "self_attn.kv_b_proj"),
}
_GPT2 = _table(
    "token_embd transformer.wte, position_embd transformer.wpe, output_norm transformer.ln_f, output lm_head, "
    "attn_norm ln_1, attn_qkv attn.c_attn, attn_output attn.c_proj, ffn_norm ln_2, ffn_up mlp.c_fc, ffn_down mlp.c_proj"
)
_GPT2_SIZES = _table(
    "n_embd embedding_length, n_layer block_count, n_head attention.head_count, n_positions context_length, "
    "n_inner feed_forward_length"
)
_MAMBA = _table(
    "ssm_in mamba.in_proj, ssm_conv1d mamba.conv1d, ssm_dt mamba.dt_bias, ssm_a mamba.A_log, ssm_d mamba.D, "
    "ssm_norm mamba.norm, ssm_out mamba.out_proj"
)
_MAMBA_SIZES = _table(
    "mamba_d_conv ssm.conv_kernel, mamba_d_state ssm.state_size, mamba_n_groups ssm.group_count"
)  # fmt: skip
_MIXER = {name: mine.replace("mamba", "mixer") for name, mine in _MAMBA.items()}
# Of models without attention
_BACKBONE = _table("token_embd backbone.embeddings, output_norm backbone.norm_f, output lm_head, attn_norm norm")
_BACKBONE_SIZES = _table("conv_kernel ssm.conv_kernel, state_size ssm.state_size")
_BIASES = _table("use_bias ssm_in.bias, use_conv_bias ssm_conv1d.bias")
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_PER_LAYER = _table(
    "per_layer_token_embd model.embed_tokens_per_layer, per_layer_model_proj model.per_layer_model_projection, "
    "per_layer_proj_norm model.per_layer_projection_norm, inp_gate per_layer_input_gate, proj per_layer_projection, "
    "post_norm post_per_layer_input_norm"
)
_HUNYUAN_NORMS = _table("attn_q_norm self_attn.query_layernorm, attn_k_norm self_attn.key_layernorm")
_CHOSEN = {"num_experts_per_tok": "expert_used_count"}
_LOCAL = {**_CHOSEN, "num_local_experts": "expert_count"}
_EXPERTS = {**_CHOSEN, "num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_WITH_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_DEEPSEEK = _CHOSEN | _table(
    "n_routed_experts expert_count, moe_intermediate_size expert_feed_forward_length, "
    "n_shared_experts expert_shared_count, first_k_dense_replace leading_dense_block_count, "
    "routed_scaling_factor expert_weights_scale, norm_topk_prob expert_weights_norm"
)
_NEMOTRON_EXPERTS = {
    **_without(_DEEPSEEK, "first_k_dense_replace"),
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_DELTA = _table(
    "linear_conv_kernel_dim ssm.conv_kernel, linear_key_head_dim ssm.state_size, linear_num_key_heads ssm.group_count, "
    "linear_num_value_heads ssm.time_step_rank"
)
_MULTIPLIERS = _table(
    "attention_multiplier attention.scale, embedding_multiplier embedding_scale, residual_multiplier residual_scale, "
    "logits_scaling logit_scale"
)
_GRANITE_MOE = {
    **_NAMES,
    "ffn_gate_inp": "block_sparse_moe.router",
    **dict.fromkeys(EXPERTS, "block_sparse_moe.experts"),
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), "shared_mlp.input_linear"),
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_LFM2 = {
    **_table(
        "token_embd model.embed_tokens, token_embd_norm model.embedding_norm, output lm_head, attn_norm operator_norm, "
        "ffn_norm ffn_norm"
    ),
    **_attention("self_attn", "out_proj"),
    **_table(
        "attn_q_norm self_attn.q_layernorm, attn_k_norm self_attn.k_layernorm, shortconv.conv conv.conv, "
        "shortconv.in_proj conv.in_proj, shortconv.out_proj conv.out_proj, ffn_gate feed_forward.w1, "
        "ffn_up feed_forward.w3, ffn_down feed_forward.w2"
    ),
}
_CONV = {"conv_L_cache": "shortconv.l_cache"}
_TANH, _NORMALIZED, _RELU2 = (
    {"hidden_activation": "gelu_pytorch_tanh"},
    {"norm_topk_prob": True},
    {"hidden_act": "relu2"},
)
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_WINDOW, _LOGITS = {"sliding_window": "attention.sliding_window"}, {"logit_scale": "logit_scale"}
_SOFTCAPS = {**{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}, **_WINDOW}
# llama.cpp always normalizes the weights of the chosen experts, so GGUF files have no key for it.
_QWEN3_MOE = Architecture("qwen3_moe", {**_NAMES, **_HEAD_NORMS, **_ROUTED}, _EXPERTS, _NORMALIZED)
_NEMOTRON_H = Architecture(
    "nemotron_h",
    {
        **_table("token_embd model.embeddings, output_norm model.norm_f, output lm_head, attn_norm norm"),
        **_attention("mixer", "o_proj"),
        **_MIXER,
        **_table("ffn_up mixer.up_proj, ffn_down mixer.down_proj, ffn_gate_inp mixer.gate"),
        "exp_probs_b": "mixer.gate.e_score_correction_bias",
        **dict.fromkeys(EXPERTS, "mixer.experts"),
        **_table("ffn_up_shexp mixer.shared_experts.up_proj, ffn_down_shexp mixer.shared_experts.down_proj"),
        **_table("ffn_latent_down mixer.fc1_latent_proj, ffn_latent_up mixer.fc2_latent_proj"),
    },
    _table(
        "conv_kernel ssm.conv_kernel, ssm_state_size ssm.state_size, n_groups ssm.group_count, "
        "mamba_num_heads ssm.time_step_rank"
    ),
    _ONE_GROUP,
    {**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias", **_BIASES},
    norm="layer_norm_epsilon",
    config=_nemotron_h,
)
_DELTA_RULE: Any = {"shifted": True, "partial": True, "config": _linear_attention}
# Decoders that are those of transformers' Llama
_PAIRED_LLAMA = Architecture("llama", _LLAMA, pairs=True)
ARCHITECTURES = {
    "llama": _PAIRED_LLAMA,
    "internlm2": _PAIRED_LLAMA,
    "exaone": Architecture("llama", _LLAMA),
    "arcee": Architecture("arcee", {**_NAMES, **_UP_DOWN}, fixed=_RELU2, pairs=True),
    "smollm3": Architecture("smollm3", _LLAMA, fixed={"no_rope_layer_interval": 4}, pairs=True),
    "mistral3": Architecture("ministral3", _LLAMA, pairs=True, config=_mistral3),
    "ernie4_5": Architecture("ernie4_5", _LLAMA),
    "seed_oss": Architecture("seed_oss", {**_SECOND_NORM, **_MLP}, present=_ATTENTION_BIAS),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", {**_LLAMA, **_HUNYUAN_NORMS}, present=_ATTENTION_BIAS),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {**_NAMES, **_HUNYUAN_NORMS, **_ROUTED, "ffn_gate_inp": "mlp.gate.wg", **_mlp("mlp.shared_mlp", "_shexp")},
        _table("num_experts expert_count, moe_topk expert_used_count, intermediate_size expert_feed_forward_length"),
        present=_ATTENTION_BIAS,
    ),
    "exaone4": Architecture("exaone4", _NORMS_BEHIND, config=_windows),
    "olmo": Architecture(
        "olmo", _without(_LLAMA, "attn_norm", "ffn_norm", "output_norm"), norm="", pairs=True,
        config=lambda meta, _: {"clip_qkv": meta.get("attention.clamp_kqv")},
    ),
    "olmo2": Architecture("olmo2", _NORMS_BEHIND, config=_olmo2),
    "olmoe": Architecture("olmoe", {**_NAMES, **_HEAD_NORMS, **_ROUTED}, _CHOSEN | {"num_experts": "expert_count"}),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen2vl": Architecture("qwen2", _LLAMA),  # the three positions of a token of text are equal
    "qwen2moe": Architecture("qwen2_moe", {**_NAMES, **_SHARED_EXPERT}, _WITH_SHARED, {"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3", {**_LLAMA, **_HEAD_NORMS}),
    "qwen3vl": Architecture("qwen3", {**_LLAMA, **_HEAD_NORMS}),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen3next": Architecture(
        "qwen3_next", {**_SECOND_NORM, **_HEAD_NORMS, **_SHARED_EXPERT}, _DELTA | _WITH_SHARED, _NORMALIZED,
        linear="qwen3next", **_DELTA_RULE,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", {**_SECOND_NORM, **_HEAD_NORMS, **_MLP}, _DELTA, linear="qwen35", **_DELTA_RULE,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", {**_SECOND_NORM, **_HEAD_NORMS, **_SHARED_EXPERT}, _DELTA | _WITH_SHARED, _NORMALIZED,
        linear="qwen35", **_DELTA_RULE,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", {**_SECOND_NORM, **_ROUTED, "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        {**_LOCAL, "intermediate_size": "expert_feed_forward_length", **_WINDOW}, {"attention_bias": True},
        config=_gpt_oss,
    ),
    "minimax-m2": Architecture(
        "minimax_m2", {**_NAMES, **_HEAD_NORMS, **_ROUTED, "exp_probs_b": "mlp.e_score_correction_bias"},
        {**_LOCAL, "intermediate_size": "expert_feed_forward_length"}, partial=True,
    ),
    "chatglm": Architecture(
        "glm", {**_NAMES, **_GATE_UP_DOWN}, present=_ATTENTION_BIAS, partial=True,
        config=lambda meta, _: {"head_dim": _head_size(meta)},
    ),
    "glm4": Architecture(
        "glm4",
        {**_NAMES, **_table("post_attention_norm post_self_attn_layernorm, post_ffw_norm post_mlp_layernorm"),
         **_GATE_UP_DOWN}, present=_ATTENTION_BIAS, partial=True, config=_glm4,
    ),
    "glm4moe": Architecture(
        "glm4_moe", {**_SECOND_NORM, **_HEAD_NORMS, **_SHARED_EXPERTS}, _DEEPSEEK, _ONE_GROUP,
        present={**_ATTENTION_BIAS, "use_qk_norm": "attn_q_norm.weight"}, partial=True,
    ),
    "dots1": Architecture("dots1", {**_NAMES, **_HEAD_NORMS, **_SHARED_EXPERTS}, _DEEPSEEK, _ONE_GROUP),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {**_NAMES, **_SHARED_EXPERTS, "exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias"},
        _table(
            "moe_num_experts expert_count, moe_k expert_used_count, moe_intermediate_size expert_feed_forward_length, "
            "moe_num_shared_experts expert_shared_count, moe_layer_start_index leading_dense_block_count, "
            "moe_layer_interval interleave_moe_layer_step"
        ),
        config=lambda meta, _: {"moe_layer_end_index": meta["block_count"] - 1},
    ),
    "granite": Architecture("granite", _LLAMA, _MULTIPLIERS, pairs=True),
    "granitemoe": Architecture("granitemoe", _GRANITE_MOE, _MULTIPLIERS | _LOCAL, pairs=True, config=_granitemoe),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {**_GRANITE_MOE, **dict.fromkeys(("ffn_gate", "ffn_up"), "shared_mlp.input_linear"),
         "ffn_down": "shared_mlp.output_linear", **_MAMBA}, _MULTIPLIERS | _MAMBA_SIZES,
        present={"mamba_conv_bias": "ssm_conv1d.bias"}, pairs=True, config=_granitehybrid,
    ),
    "minicpm": Architecture(
        "granite", _LLAMA, _without(_MULTIPLIERS, "attention_multiplier"), pairs=True,
        config=lambda meta, _: {"attention_multiplier": _head_size(meta) ** -0.5},
    ),
    "phi2": Architecture(
        "phi",
        _without(_NAMES, "ffn_norm")
        | _table("output_norm model.final_layernorm, attn_output self_attn.dense, ffn_up mlp.fc1, ffn_down mlp.fc2"),
        fixed={"hidden_act": "gelu_new"},
        norm="layer_norm_eps",
        partial=True,
    ),
    "phi3": Architecture(
        "phi3", {**_NAMES, "attn_qkv": "self_attn.qkv_proj", **_GATE_UP_DOWN}, partial=True, config=_phi3,
    ),
    "stablelm": Architecture(
        "stablelm", _LLAMA, {"use_parallel_residual": "use_parallel_residual"}, present={"use_qkv_bias": "attn_q.bias"},
        norm="layer_norm_eps", partial=True,
    ),
    "starcoder2": Architecture(
        "starcoder2", {**_NAMES, **_table("ffn_up mlp.c_fc, ffn_down mlp.c_proj")},
        fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}, norm="norm_epsilon",
    ),
    "nemotron": Architecture(
        "nemotron", {**_NAMES, **_UP_DOWN}, fixed=_RELU2, norm="norm_eps", shifted=True, partial=True,
    ),
    "gpt2": Architecture(
        "gpt2", _GPT2, _GPT2_SIZES, norm="layer_norm_epsilon", layers="transformer.h", transposed=True,
    ),
    "starcoder": Architecture(
        "gpt_bigcode", _GPT2, _GPT2_SIZES, norm="layer_norm_epsilon", layers="transformer.h",
        config=lambda meta, _: {"multi_query": meta["attention.head_count_kv"] == 1},
    ),
    "gptneox": Architecture(
        "gpt_neox",
        _table(
            "token_embd gpt_neox.embed_in, output_norm gpt_neox.final_layer_norm, output lm_head, "
            "attn_norm input_layernorm, attn_qkv attention.query_key_value, attn_output attention.dense, "
            "ffn_norm post_attention_layernorm, ffn_up mlp.dense_h_to_4h, ffn_down mlp.dense_4h_to_h"
        ),
        {"use_parallel_residual": "use_parallel_residual"},
        {"hidden_act": "gelu"},
        norm="layer_norm_eps",
        partial=True,
        layers="gpt_neox.layers",
        by_head=True,
    ),
    "deepseek2": Architecture("deepseek_v3", {**_LATENT, **_SHARED_EXPERTS}, config=_deepseek2),
    "jais2": Architecture("jais2", {**_NAMES, **_UP_DOWN}, fixed=_RELU2, norm="layer_norm_eps"),
    "apertus": Architecture(
        "apertus",
        {**_NAMES, **_HEAD_NORMS, **_UP_DOWN, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        fixed={"hidden_act": "xielu"}, present=_ATTENTION_BIAS,
        numbers={"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,), "mlp.act_fn.beta": (), "mlp.act_fn.eps": ()},
    ),
    "afmoe": Architecture(
        "afmoe",
        {
            **_SECOND_NORM,
            **_HEAD_NORMS,
            **_SHARED_EXPERTS,
            **_table("attn_gate self_attn.gate_proj, ffn_norm pre_mlp_layernorm, post_ffw_norm post_mlp_layernorm"),
            **_table("ffn_gate_inp mlp.router.gate, exp_probs_b mlp.expert_bias"),
        },
        _EXPERTS
        | _table("num_shared_experts expert_shared_count, num_dense_layers leading_dense_block_count")
        | {"route_scale": "expert_weights_scale"},
        {"mup_enabled": True},  # llama.cpp always scales embeddings by the square root of their size
        config=_windows,
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        {**_NAMES, **_HEAD_NORMS, **_SHARED_EXPERTS},
        _EXPERTS
        | _table("num_shared_experts expert_shared_count, first_k_dense_replace leading_dense_block_count")
        | _table("routed_scaling_factor expert_weights_scale, norm_topk_prob expert_weights_norm"),
        _ONE_GROUP,
        config=_windows,
    ),
    "mamba": Architecture(
        "mamba", {**_BACKBONE, **_without(_MIXER, "ssm_norm"), **_table("ssm_x mixer.x_proj, ssm_dt mixer.dt_proj")},
        _BACKBONE_SIZES | {"time_step_rank": "ssm.time_step_rank"}, present=_BIASES, norm="layer_norm_epsilon",
        layers="backbone.layers", config=_mamba,
    ),
    "mamba2": Architecture(
        "mamba2", {**_BACKBONE, **_MIXER},
        _BACKBONE_SIZES | _table("n_groups ssm.group_count, num_heads ssm.time_step_rank"), present=_BIASES,
        norm="layer_norm_epsilon", layers="backbone.layers", config=_mamba2,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "falcon-h1": Architecture(
        # llama.cpp's conversion multiplies weights with the model's multipliers, so the config keeps them at 1.
        "falcon_h1",
        {
            **_NAMES,
            **_MAMBA,
            **_table("output_norm model.final_layernorm, ffn_norm pre_ff_layernorm.weight"),
            **_mlp("feed_forward"),
        },
        _MAMBA_SIZES | _table("mamba_d_ssm ssm.inner_size, mamba_n_heads ssm.time_step_rank"),
        {"mamba_norm_before_gate": False},
        _ATTENTION_BIAS
        | _table("mlp_bias ffn_up.bias, mamba_conv_bias ssm_conv1d.bias, mamba_rms_norm ssm_norm.weight"),
        config=_falcon_h1,
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        {
            **_LATENT,
            **_SHARED_EXPERTS,
            **_table("attn_k self_attn.k_proj, attn_v self_attn.v_proj"),
            **{f"ssm_conv1d_{kind}": "self_attn.conv1d" for kind in "qkv"},
            **_table("ssm_f_a self_attn.forget_gate.f_a_proj, ssm_f_b self_attn.forget_gate.f_b_proj"),
            **_table("ssm_a self_attn.forget_gate.A_log, ssm_dt self_attn.forget_gate.dt_bias"),
            **_table("ssm_beta self_attn.b_proj, ssm_g_a self_attn.g_a_proj, ssm_g_b self_attn.g_b_proj"),
            "ssm_norm": "self_attn.o_norm",
        },
        _table(
            "num_local_experts expert_count, num_experts_per_tok expert_used_count, "
            "moe_intermediate_size expert_feed_forward_length, n_shared_experts expert_shared_count, "
            "routed_scaling_factor expert_weights_scale, kv_lora_rank attention.kv_lora_rank, "
            "v_head_dim attention.value_length_mla, linear_head_dim kda.head_dim, "
            "linear_conv_kernel_dim ssm.conv_kernel"
        ),
        _NORMALIZED | _ONE_GROUP,
        config=_kimi_linear,
    ),
    "command-r": Architecture(
        "cohere", {**_without(_LLAMA, "ffn_norm"), **_HEAD_NORMS}, _LOGITS,
        present={"use_qk_norm": "attn_q_norm.weight"}, norm="layer_norm_eps",
    ),
    "cohere2": Architecture("cohere2", _without(_LLAMA, "ffn_norm"), _LOGITS, norm="layer_norm_eps", config=_windows),
    "lfm2": Architecture(
        "lfm2", _LFM2, _CONV, {"conv_bias": False, "block_auto_adjust_ff_dim": False}, norm="norm_eps", config=_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**_LFM2, **_table("ffn_gate_inp feed_forward.gate, exp_probs_b feed_forward.expert_bias"),
         **dict.fromkeys(EXPERTS, "feed_forward.experts")},
        _CONV | _EXPERTS | {"num_dense_layers": "leading_dense_block_count"},
        {"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True}, norm="norm_eps", config=_lfm2,
    ),
    "gemma": Architecture("gemma", _LLAMA, fixed={"hidden_act": "gelu_pytorch_tanh"}, shifted=True),
    "gemma2": Architecture("gemma2", {**_LLAMA, **_FOUR_NORMS}, _SOFTCAPS, _TANH, shifted=True, config=_gemma2),
    "gemma3": Architecture(
        "gemma3_text", {**_LLAMA, **_FOUR_NORMS, **_HEAD_NORMS}, _WINDOW, _TANH, shifted=True, config=_gemma3,
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        {
            **_LLAMA,
            **_FOUR_NORMS,
            **_HEAD_NORMS,
            **_PER_LAYER,
            **_table("altup_proj model.altup_projections, altup_unembd_proj model.altup_unembed_projections"),
            **_table("altup_correct_coef altup.correction_coefs, altup_correct_scale altup.correct_output_scale"),
            **_table("altup_predict_coef altup.prediction_coefs, altup_router altup.modality_router"),
            **_table("altup_router_norm altup.router_norm, laurel_l laurel.linear_left, laurel_r laurel.linear_right"),
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        _table(
            "altup_active_idx altup.active_idx, altup_num_inputs altup.num_inputs, "
            "hidden_size_per_layer_input embedding_length_per_layer_input, "
            "num_kv_shared_layers attention.shared_kv_layers"
        ),
        _TANH,
        config=_gemma3n,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {**_LLAMA, **_FOUR_NORMS, **_HEAD_NORMS, **dict.fromkeys(EXPERTS, "experts"),
         "layer_output_scale": "layer_scalar", **_PER_LAYER,
         **_table("ffn_gate_inp router.proj, ffn_gate_inp.scale router.scale"),
         **_table("ffn_down_exps.scale router.per_expert_scale, pre_ffw_norm_2 pre_feedforward_layernorm_2"),
         **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)}}, fixed=_TANH, config=_gemma4,
    ),
}  # fmt: skip
"""The architectures, by llama.cpp's name."""
MIXTRAL = Architecture("mixtral", {**_NAMES, **_ROUTED}, _LOCAL, pairs=True)
"""The architecture that llama.cpp names llama as well, in files with experts."""
