"""Tests of recipes of models on the hub: their plans for the models' configs, without the hub and without weights."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvexport.export.build import plan_memory
from kvexport.recipe.load import load_recipe

# The published configs. Absent fields have transformers' defaults, which are those of the model.
LFM2_ATTENDS = (2, 5, 8, 10, 12, 14)
GRANITE_ATTENDS = (5, 15, 25, 35)
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss-20b": ("GptOss", "ForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "glm47-flash": ("Glm4MoeLite", "ForCausalLM", {}),
    "lfm25-1b": ("Lfm2", "ForCausalLM", {
        "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 12288, "block_auto_adjust_ff_dim": True,
        "layer_types": ["full_attention" if i in LFM2_ATTENDS else "conv" for i in range(16)],
    }),
    "qwen36-35b-a3b": ("Qwen3_5Moe", "ForConditionalGeneration", {"tie_word_embeddings": False}),
    "gemma4-26b-a4b": ("Gemma4", "ForConditionalGeneration", {"text_config": {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "sliding_window": 1024, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "final_logit_softcapping": 30.0,
    }}),
    "gemma4-e4b": ("Gemma4", "ForConditionalGeneration", {"text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_kv_shared_layers": 18, "final_logit_softcapping": 30.0,
    }}),
    "qwen35-4b": ("Qwen3_5", "ForConditionalGeneration", {
        "text_config": {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
        "tie_word_embeddings": True,
    }),
    "granite4-h-tiny": ("GraniteMoeHybrid", "ForCausalLM", {
        "vocab_size": 100352, "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 12,
        "layer_types": ["attention" if i in GRANITE_ATTENDS else "mamba" for i in range(40)],
        "num_key_value_heads": 4, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64,
        "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_state": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip
# (parameters of the text part, layers that attend, share of the experts' bytes that a token reads)
PUBLISHED = {
    "gpt-oss-20b": (20_914_757_184, 24, 4 / 32), "glm47-flash": (29_943_393_920, 47, 4 / 64),
    "lfm25-1b": (1_170_340_608, 6, 0), "qwen36-35b-a3b": (34_660_610_688, 10, 8 / 256),
    "gemma4-26b-a4b": (25_233_141_790, 30, 8 / 128), "gemma4-e4b": (7_463_013_418, 24, 0),
    "qwen35-4b": (4_205_751_296, 8, 0), "granite4-h-tiny": (6_939_037_248, 4, 6 / 64),
}  # fmt: skip


def mxfp4_headers(config: Any, folder: Path) -> None:
    """Write the header of gpt-oss's tensors, with experts in MXFP4, before a hole in place of the weights."""
    model_config = json.loads((folder / "config.json").read_text())
    model_config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(model_config))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            tensors[f"{name}_blocks"] = "U8", (experts, outputs, inputs // 32, 16)
            tensors[f"{name}_scales"] = "U8", (experts, outputs, inputs // 32)
        else:
            tensors[name] = "BF16", tuple(tensor.shape)
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = (1 if dtype == "U8" else 2) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_plans_the_published_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ending, fields = CONFIGS[name]
    config = getattr(transformers, f"{model}Config")(**fields, architectures=[model + ending])
    config.save_pretrained(tmp_path)
    if name == "gpt-oss-20b":
        mxfp4_headers(config, tmp_path)
    recipe = load_recipe(name).recipe
    requested: list[str] = []

    def download(hub_id: str, *_: Any, **__: Any) -> Path:
        requested.append(hub_id)
        return tmp_path

    monkeypatch.setattr("kvexport.export.model.checkpoint.download", download)
    plan = plan_memory(recipe, name)
    parameters, attends, share = PUBLISHED[name]
    assert set(requested) == {recipe.model.path}
    assert (plan.parameters, len(plan.geometry)) == (parameters, attends)
    if name == "glm47-flash":
        assert {layer.slot_bytes() for layer in plan.cache.caches} == {4 * 576}
    if share:
        # Biases of experts are read like their weights.
        assert plan.expert_read_bytes == pytest.approx(plan.expert_bytes * share, rel=1e-6)
        numbers = 24 * 32 * 3 * 2880 * 2880
        if name == "gpt-oss-20b":  # 4.25 bits, tables, and biases in float32
            assert plan.expert_bytes == numbers * 17 // 32 + 24 * 2 * 16 + 4 * 24 * 32 * 3 * 2880
        else:
            assert plan.expert_bytes < 0.15 * 4 * parameters
