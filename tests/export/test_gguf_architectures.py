"""GGUF files of each architecture give the tensors, sizes and settings of the model from which they were made."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.build import read_model
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.gguf import read_gguf
from kvexport.export.model.gguf_model import tensors_of
from kvexport.export.model.tensors import PackedExperts, dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_specs
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.casting import load_tensor
from tests.support import models
from tests.support.gguf_files import F32, Q8_0, Tensors, entry, gguf, q8_0
from tests.support.tiny_model import RECIPE

MXFP4, IQ4_NL = 39, 20
SIZES = {**models.SIZES, "vocab_size": 64, "pad_token_id": 0}
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{mine}": name for mine, name in ATTENTION.items()},
}  # fmt: skip
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
LFM2 = {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "conv.conv": "shortconv.conv",
    "self_attn.k_layernorm": "attn_k_norm", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
}  # fmt: skip
HYBRID = {
    **NAMES, "post_attention_layernorm": "post_attention_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
KEY_HEADS, VALUE_HEADS, KEY_SIZE = 2, 6, 16
DELTA = {
    "head_dim": 32, "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY_SIZE, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
DELTA_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32,
}  # fmt: skip
DELTA_META = {
    "attention.key_length": 32, "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": KEY_SIZE,
    "ssm.group_count": KEY_HEADS, "ssm.time_step_rank": VALUE_HEADS, "rope.dimension_count": 8,
}  # fmt: skip
EXPERTS_META = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 32,
}  # fmt: skip
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 128,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
# (class, changes of the config, names, metadata)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "qwen3moe": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "norm_topk_prob": True},
        {**NAMES, "mlp.gate": "ffn_gate_inp"},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64, "attention.key_length": 32},
    ),
    "qwen3next": (
        "Qwen3Next",
        {**DELTA, **DELTA_EXPERTS, "linear_value_head_dim": 32,
         "rope_parameters": {**ROTARY, "partial_rotary_factor": 0.25}},
        HYBRID,
        {**DELTA_META, **EXPERTS_META, "ssm.inner_size": 32 * VALUE_HEADS},
    ),
    "qwen35": (
        "Qwen3_5",
        {**DELTA, "linear_value_head_dim": 32,
         "rope_parameters": {**ROTARY, **SECTIONS, "partial_rotary_factor": 0.25}},
        HYBRID,
        {**DELTA_META, "ssm.inner_size": 32 * VALUE_HEADS, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    # Heads of 16 values: a group of 32 columns reaches over two heads. The last layer predicts later tokens.
    "qwen35moe": (
        "Qwen3_5Moe",
        {**DELTA, **DELTA_EXPERTS, "linear_value_head_dim": 16,
         "rope_parameters": {**ROTARY, **SECTIONS, "partial_rotary_factor": 0.25}},
        HYBRID,
        {**DELTA_META, **EXPERTS_META, "ssm.inner_size": 16 * VALUE_HEADS, "nextn_predict_layers": 1,
         "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
         "intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": YARN},
        {**NAMES, "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks",
         "mlp.router": "ffn_gate_inp"},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64, "attention.key_length": 32,
         "attention.sliding_window": 24, "rope.freq_base": 150000.0, "rope.scaling.type": "yarn",
         "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 128},
    ),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
         "logits_scaling": 8.0, "rope_parameters": ROTARY},
        NAMES,
        {"attention.scale": 0.125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": 40, "rope_parameters": {**ROTARY, "partial_rotary_factor": 0.5}},
        {**NAMES, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        {"attention.sliding_window": 40, "rope.dimension_count": 8},
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "hidden_activation": "gelu_pytorch_tanh",
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {**NAMES, **FOUR_NORMS},
        {"attention.key_length": 32, "attention.sliding_window": 24, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "num_hidden_layers": 7,
         "rope_parameters": {"sliding_attention": ROTARY, "full_attention": {
             "rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}}},
        {**NAMES, **FOUR_NORMS},
        {"attention.key_length": 32, "attention.sliding_window": 24, "rope.freq_base": 1000000.0,
         "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
         "rope_parameters": ROTARY},
        {**NAMES, **LFM2},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
}  # fmt: skip


def blocks_of(kind: int, shape: tuple[int, ...], seed: int) -> tuple[bytes, NDArray[np.float32]]:
    """Return random blocks of 32 numbers of MXFP4 or IQ4_NL, and their values."""
    reference = pytest.importorskip("gguf", reason="not reached: pip install gguf")
    rng, count = np.random.default_rng(seed), int(np.prod(shape)) // 32
    scale = rng.integers(117, 121, (count, 1), np.uint8)
    if kind == IQ4_NL:
        scale = (rng.random((count, 1)) * 0.002).astype(np.float16).view(np.uint8)
    stored = np.concatenate([scale, rng.integers(0, 256, (count, 16), np.uint8)], 1)
    values = reference.dequantize(stored, reference.GGMLQuantizationType(kind))
    return stored.tobytes(), values.reshape(shape).astype(np.float32)


def experts(stem: str, own: str, weight: NDArray[Any], of_gpt_oss: bool, tensors: Tensors) -> NDArray[Any]:
    """Put a weight or bias of experts into `tensors`, and return its values in an artifact."""
    down, biases = own.startswith("mlp.experts.down"), own.endswith("_bias")
    kind, ending = (F32, "bias") if biases else (MXFP4 if of_gpt_oss else IQ4_NL, "weight")
    if of_gpt_oss and not biases:
        weight = weight.swapaxes(1, 2)
    rows = [weight] if down else [weight[:, 0::2], weight[:, 1::2]] if of_gpt_oss else np.split(weight, 2, 1)
    held = []
    for name, part in zip(["down"] if down else ["gate", "up"], rows, strict=True):
        part = np.ascontiguousarray(part)
        data, values = (part.tobytes(), part) if biases else blocks_of(kind, part.shape, len(tensors))
        tensors[f"{stem}ffn_{name}_exps.{ending}"] = (part.shape[::-1], kind, data)
        held.append(values)
    return np.concatenate(held, 1)


def apart(rows: NDArray[Any], *, back: bool = False) -> NDArray[Any]:
    """Return the rows of value heads in llama.cpp's order of qwen35, or `back` in that of transformers."""
    groups = (KEY_HEADS, VALUE_HEADS // KEY_HEADS)
    split = rows.reshape(*(groups[::-1] if back else groups), -1, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(0, 1)).reshape(rows.shape)


def linear_attention(kind: str, stem: str, own: str, weight: NDArray[Any], tensors: Tensors) -> NDArray[Any]:
    """Put a parameter of linear attention into `tensors`, and return its values in an artifact."""
    own, split = own.removeprefix("linear_attn."), 2 * KEY_HEADS * KEY_SIZE
    is_apart = kind != "qwen3next"

    def put(name: str, rows: NDArray[Any]) -> NDArray[Any]:
        data, held = q8_0(rows) if own.endswith("proj") or own.startswith("in_proj") else (rows.tobytes(), rows)
        tensors[f"{stem}{name}"] = (rows.shape[::-1], F32 if held is rows else Q8_0, data)
        return held

    if own == "in_proj_qkvz":
        of_key = (weight.shape[0] - split) // KEY_HEADS // 2
        groups = weight.reshape(KEY_HEADS, -1, weight.shape[1])
        parts = np.split(groups, np.cumsum([KEY_SIZE, KEY_SIZE, of_key]), axis=1)
        queries, keys, values, gates = (part.reshape(-1, weight.shape[1]) for part in parts)
        held = put("attn_qkv.weight", np.concatenate([queries, keys, values]))
        pieces = [*np.split(held, [len(queries), split]), put("attn_gate.weight", np.ascontiguousarray(gates))]
        return np.concatenate([x.reshape(KEY_HEADS, -1, weight.shape[1]) for x in pieces], axis=1).reshape(weight.shape)
    if own == "A_log":
        stored = put("ssm_a", -np.exp(apart(weight) if is_apart else weight))
        return np.log(-(apart(stored, back=True) if is_apart else stored))
    if own == "out_proj":
        held = put("ssm_out.weight", np.ascontiguousarray(apart(weight.T).T) if is_apart else weight)
        return apart(held.T, back=True).T if is_apart else held
    name = {"in_proj_ba": "ssm_ba.weight", "in_proj_b": "ssm_beta.weight", "in_proj_a": "ssm_alpha.weight",
            "in_proj_qkv": "attn_qkv.weight", "in_proj_z": "attn_gate.weight", "dt_bias": "ssm_dt.bias",
            "conv1d": "ssm_conv1d.weight", "norm": "ssm_norm.weight"}[own]  # fmt: skip
    rows = weight.reshape(weight.shape[0], -1) if weight.ndim == 3 else weight
    if not is_apart or own in ("norm", "in_proj_ba"):
        return put(name, rows)
    first = split if own in ("conv1d", "in_proj_qkv") else 0  # queries and keys stay
    held = put(name, np.concatenate([rows[:first], apart(rows[first:])]))
    return np.concatenate([held[:first], apart(held[first:], back=True)])


def file_of(kind: str, folder: Path) -> tuple[Path, Any, dict[str, NDArray[Any]]]:
    """Return a GGUF file of a tiny random model, the model's config, and its parameters' values in an artifact."""
    name, changes, names, metadata = CASES[kind]
    kind_of_config = f"{name}{'Text' if kind in ('gemma3', 'qwen35', 'qwen35moe') else ''}Config"
    config = getattr(transformers, kind_of_config)(**{**SIZES, "tie_word_embeddings": False, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    tensors: Tensors = {}
    values: dict[str, NDArray[Any]] = {}
    for parameter, tensor in model.named_parameters():
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", parameter)
        layer, own, ending = match.groups()
        weight = (tensor.detach() + torch.rand_like(tensor) * 0.1).numpy()
        stem = f"blk.{layer}." if layer else ""
        if ".experts." in parameter:
            values[parameter] = experts(stem, own, weight, kind == "gpt-oss", tensors)
            continue
        if own.startswith("linear_attn."):
            values[parameter] = linear_attention(kind, stem, own, weight, tensors)
            continue
        values[parameter], shape = weight, weight.shape[::-1]
        shifted = own.endswith("norm") and (kind.startswith("gemma") or kind in ("qwen3next", "qwen35", "qwen35moe"))
        stored = weight + 1 if shifted else weight
        data, of_type = stored.tobytes(), F32
        if shifted:
            values[parameter] = stored - np.float32(1)
        if own == "conv.conv":
            shape = (shape[0], shape[2])
        elif own == "mlp.shared_expert_gate":
            shape = shape[:1]
        elif weight.ndim == 2:
            of_type = Q8_0
            data, values[parameter] = q8_0(weight)
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(own, 0) if kind == "granite" else 0
            if heads:
                rows = np.frombuffer(data, np.uint8).reshape(heads, 2, weight.shape[0] // heads // 2, -1)
                data = rows.swapaxes(1, 2).tobytes()
        tensors[f"{stem}{names[own]}.{ending or 'weight'}"] = (shape, of_type, data)
    drafted = metadata.get("nextn_predict_layers", 0)
    if drafted:
        tensors[f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"] = ((64, 2), F32, bytes(512))
    dense = {"feed_forward_length": config.intermediate_size} if hasattr(config, "intermediate_size") else {}
    sizes = {
        "embedding_length": 64, **dense, "context_length": 512, "block_count": config.num_hidden_layers + drafted,
        "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None) or config.norm_eps,
    }  # fmt: skip
    texts = {
        "model": "gpt2", "pre": "smollm", "tokens": ["<|end|>", "a", "b", "ab", *map(chr, range(99, 159))],
        "token_type": [3] + [1] * 63, "merges": ["a b"], "eos_token_id": 0, "padding_token_id": 0,
    }  # fmt: skip
    described = {
        "general.architecture": kind,
        **{f"{kind}.{key}": value for key, value in {**sizes, **metadata}.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in texts.items()},
    }
    file = folder / "tiny.gguf"
    file.write_bytes(gguf({key: entry(value) for key, value in described.items()}, tensors))
    return file, model.config, values


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", CASES)
def test_a_file_has_the_config_and_the_weights_of_its_model(kind: str, tmp_path: Path) -> None:
    file, config, expected = file_of(kind, tmp_path)
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(file)}})
    shape = read_model(recipe)
    written = json.loads((shape.checkpoint.path / "config.json").read_text())
    own = {key: value for key, value in config.to_dict().items() if key in written and not key.endswith("_token_id")}
    for key in set(own) - {"architectures", "dtype"}:
        assert written[key] == own[key], key
    specs = {spec.name.removeprefix("model."): spec for spec in weight_specs(shape.checkpoint, shape.model, recipe)}
    assert specs.keys() == expected.keys()
    for name, spec in specs.items():
        values = dense_values(spec.source) if isinstance(spec, ComputedSpec) else load_tensor(spec.entry, "float32")
        np.testing.assert_array_equal(values.reshape(spec.shape), expected[name].reshape(spec.shape), err_msg=name)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            assert isinstance(spec, ComputedSpec) and isinstance(spec.source, PackedExperts)
            assert spec.source.packing is not None and spec.source.packing.bits == 4 and spec.source.packing.table


def changed_file(
    architecture: str, change: Callable[[Tensors], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    whole = gguf

    def changed(entries: Any, tensors: Tensors) -> bytes:
        change(tensors)
        return whole(entries, tensors)

    monkeypatch.setattr("tests.export.test_gguf_architectures.gguf", changed)
    return file_of(architecture, folder)[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("blk.0.ssm_a"), "no tensor ssm_a for the layer 'model.layers.0.linear_attn'"),
        (
            lambda t: t.update({"blk.0.ssm_dt.bias": ((5,), F32, bytes(20))}),
            r"'blk.0.ssm_dt.bias' .* has shape \[5\], which does not fit 2 key heads of 16 and 6 value heads of 32",
        ),
        (
            lambda t: t.update({"blk.0.ssm_a": ((6,), F32, bytes(24))}),
            "'blk.0.ssm_a' .* has values that are not below 0",
        ),
        (lambda t: t.update({"blk.0.attn_q": ((6,), F32, bytes(24))}), "has a tensor 'blk.0.attn_q', which no qwen35"),
    ],
    ids=["missing", "another count", "no decay", "no ending"],
)
def test_linear_attention_that_does_not_fit_is_refused(
    change: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = changed_file("qwen35", change, tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=problem):
        for source in tensors_of(read_gguf(file))[1].values():
            dense_values(source)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("blk.1.ffn_up_exps.weight"), "no tensor ffn_up_exps.weight for the experts 'model.layers.1"),
        (
            lambda t: t.update({"blk.0.ffn_up_exps.weight": ((64, 64, 3), IQ4_NL, bytes(64 * 2 * 3 * 18))}),
            r"'blk.0.ffn_up_exps.weight' .* has shape \[3, 64, 64\], and the experts of its layer have",
        ),
    ],
    ids=["missing", "another count"],
)
def test_experts_that_do_not_fit_are_refused(
    change: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = changed_file("qwen3moe", change, tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=problem):
        read_checkpoint(file)
