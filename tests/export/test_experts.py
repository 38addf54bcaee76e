"""Decoders with experts: an artifact's logits equal Hugging Face's, whatever the checkpoint's layout of the experts."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig, MixtralConfig, Qwen3MoeConfig

from kvexport.backends.onnxruntime.operators import VARIABLE
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, plan_memory, read_model
from kvexport.export.hooks.experts import Layout, expert_modules, experts_form
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.ops.experts import ExpertsForm
from kvexport.units import format_bytes
from kvexport.validate.weights import load_model
from plugins.building import make
from tests.support import models

WINDOW = 24
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
QWEN3: dict[str, Any] = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**models.SIZES, **QWEN3, norm_topk_prob=True),
    "mixtral": lambda: MixtralConfig(**models.SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(**models.SIZES, **GPT_OSS),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stored", ["apart", "stacked"])
def test_logits_are_transformers_in_chunks_and_token_by_token(name: str, stored: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    if stored == "stacked":
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model.save_pretrained(checkpoint, save_original_format=False)
    file = load_file(checkpoint / "model.safetensors")
    assert any("experts.1." in tensor for tensor in file) == (stored == "apart" and name != "gpt_oss")
    export = {"logits": "all", "prefill_chunk": 32}
    recipe = models.make_recipe(checkpoint, export=export, limits={"max_length": 160})
    artifact = build(recipe, tmp_path / "artifact")
    models.assert_logits_of_transformers(load(artifact), checkpoint)
    nodes = [node.op_type for node in onnx.load(artifact / "decoder.onnx", load_external_data=False).graph.node]
    assert nodes.count("Experts") == 2


def test_sink_logits_are_float32_in_a_float16_model(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["gpt_oss"]())
    export = {"logits": "all", "prefill_chunk": 32}
    recipe = models.make_recipe(checkpoint, dtype="float16", export=export, limits={"max_length": 160})
    ids = models.random_ids(0, 60)
    (actual,) = models.given_tokens_logits(load(build(recipe, tmp_path / "artifact")), ids, (50,))
    (right,) = models.hugging_face_logits(checkpoint, ids)
    assert np.abs(actual - right).max() <= 2e-2 * np.abs(right).max()


ROUNDED = [
    ({"bits": 4, "group": 32}, ["", ".scale"]),
    ({"bits": 8, "group": 64, "symmetric": False}, ["", ".scale", ".zero"]),
]


@pytest.mark.parametrize(("weights", "parts"), ROUNDED, ids=["int4", "uint8 with zero points"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_rounded_experts_compute_with_the_dequantized_weights(
    name: str, weights: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    # Chunks have so few rows that inputs are rounded to 16 bits: two lanes have less than the 20 rows of AMX.
    export = {"logits": "all", "prefill_chunk": 8}
    recipe = models.make_recipe(checkpoint, export=export, limits={"max_length": 160}, weights=weights)
    artifact = build(recipe, tmp_path / "artifact")
    ids = models.random_ids(0, 90, 60)
    model = load_model(read_checkpoint(checkpoint), recipe, "eager")  # with the rounded weights
    with torch.no_grad():
        right = [model(torch.from_numpy(row)[None]).logits[0].numpy() for row in ids]
    float_input = weights["bits"] == 8
    engine = load(artifact, float_input=float_input)
    for actual, logits in zip(models.given_tokens_logits(engine, ids, (50, 20)), right, strict=True):
        assert np.abs(actual - logits).max() <= (1e-5 if float_input else 1e-3) * np.abs(logits).max()
    graph = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph
    inputs = [x for node in graph.node if node.op_type == "Experts" for x in node.input]
    down = "model.model.layers.1.mlp.experts.down_proj"
    assert [x for x in inputs if x.startswith(down) and "bias" not in x] == [down + part for part in parts]
    stored = {x.name: x for x in graph.initializer}
    bits = weights["bits"]
    kinds = {4: onnx.TensorProto.INT4, 8: onnx.TensorProto.UINT8}
    assert stored[down].data_type == kinds[bits] and len(stored[down].dims) == 3
    location = {x.key: x.value for x in stored[down].external_data}
    assert int(location["length"]) == np.prod(stored[down].dims) * bits // 8


@pytest.mark.parametrize("chosen", [1, 2])
def test_llama_4_computes_the_chosen_experts_alone(chosen: int, tmp_path: Path) -> None:
    config = Llama4TextConfig(
        **models.SIZES, head_dim=16, intermediate_size_mlp=64, num_local_experts=8, num_experts_per_tok=chosen
    )
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", config)
    export, weights = {"logits": "all", "prefill_chunk": 8}, {"bits": 8, "group": 32}
    recipe = models.make_recipe(checkpoint, export=export, limits={"max_length": 160}, weights=weights)
    ids = models.random_ids(0, 90, 60)
    model = load_model(read_checkpoint(checkpoint), recipe, "eager")  # with the rounded weights
    with torch.no_grad():
        right = [model(torch.from_numpy(row)[None]).logits[0].numpy() for row in ids]
    engine = load(build(recipe, tmp_path / "artifact"), float_input=True)
    for actual, logits in zip(models.given_tokens_logits(engine, ids, (50, 20)), right, strict=True):
        assert np.abs(actual - logits).max() <= 1e-5 * np.abs(logits).max()
    plan = plan_memory(recipe)
    assert plan.expert_read_bytes * 8 == plan.expert_bytes * chosen


MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_mxfp4(checkpoint: Path, packed: Path) -> None:
    """Write gpt-oss with random MXFP4 experts into `packed`, and with their values as floats into `checkpoint`."""
    rng, tensors = np.random.default_rng(0), load_file(checkpoint / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 124, (experts, outputs, inputs // 32), np.uint8)
        numbers = MXFP4[np.stack([blocks & 15, blocks >> 4], -1)].reshape(experts, outputs, inputs // 32, 32)
        values = (numbers * 2.0 ** (scales[..., None].astype(np.float64) - 127)).reshape(experts, outputs, inputs)
        tensors[name] = torch.from_numpy(values.transpose(0, 2, 1).copy()).to(tensor.dtype)
        del stored[name]
        stored |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))


def test_experts_of_mxfp4_stay_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 experts stay in 4 bits, and the kernels of the CPU, and of CUDA on the host, compute with them."""
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["gpt_oss"]())
    packed = Path(shutil.copytree(checkpoint, tmp_path / "packed"))
    in_mxfp4(checkpoint, packed)
    export = {"logits": "all", "prefill_chunk": 32}
    recipe = models.make_recipe(packed, export=export, limits={"max_length": 160})
    artifact = build(recipe, tmp_path / "artifact")
    ids = models.random_ids(0, 90, 60)
    right = models.hugging_face_logits(checkpoint, ids)
    engines = [load(artifact, float_input=True)]
    if make.is_current("onnxruntime-cuda-host"):
        monkeypatch.setenv(VARIABLE, str(make.host_output("onnxruntime-cuda-host")))
        engines.append(load(artifact, float_input=True))
    for engine in engines:
        for actual, logits in zip(models.given_tokens_logits(engine, ids, (50, 20)), right, strict=True):
            assert np.abs(actual - logits).max() <= 1e-5 * np.abs(logits).max()
    graph = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph
    stored = {x.name: x.data_type for x in graph.initializer if x.name.endswith("_proj") and "experts" in x.name}
    assert len(stored) == 4 and set(stored.values()) == {onnx.TensorProto.UINT4}
    numbers = sum(np.prod(x.dims) for x in graph.initializer if x.name in stored)
    biases = sum(4 * np.prod(x.dims) for x in graph.initializer if x.name.endswith("_proj_bias"))
    assert plan_memory(recipe).expert_bytes == numbers // 2 + numbers // 32 + 4 * 16 + biases


def test_scales_that_do_not_fit_mxfp4_experts_are_refused(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["gpt_oss"]())
    packed = Path(shutil.copytree(checkpoint, tmp_path / "packed"))
    in_mxfp4(checkpoint, packed)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, 1:].clone()}, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=f"'{name}' .* expected U8"):
        read_model(models.make_recipe(packed, limits={"max_length": 160}))


def test_the_plan_shows_the_bytes_of_all_experts_and_of_those_that_a_token_reads(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["qwen3_moe"]())
    hidden, inner, experts, top_k, layers = models.SIZES["hidden_size"], 48, 6, 2, 2
    numbers = layers * experts * 3 * hidden * inner
    plan = plan_memory(models.make_recipe(checkpoint, limits={"max_length": 160}))
    assert (plan.expert_bytes, plan.expert_read_bytes) == (4 * numbers, 4 * numbers * top_k // experts)
    rounded = models.make_recipe(checkpoint, limits={"max_length": 160}, weights={"bits": 4, "group": 32})
    scales = layers * experts * (2 * inner * hidden // 32 + hidden * inner // 16)  # 48 inputs have groups of 16
    small = plan_memory(rounded)
    assert small.expert_bytes == numbers // 2 + 2 * scales
    assert small.expert_read_bytes == small.expert_bytes * top_k // experts
    summary = small.sections()[0].mapping
    assert summary["experts"].endswith(f"of which a token reads {format_bytes(small.expert_read_bytes)}")


def test_a_missing_expert_is_named_before_a_weight_is_read(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["qwen3_moe"]())
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"has no 'model.layers.1.mlp.experts.3.up_proj.weight': .* 6 experts"):
        build(models.make_recipe(checkpoint, limits={"max_length": 160}), tmp_path / "artifact")


def test_a_number_of_experts_unlike_the_configs_is_refused(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["qwen3_moe"]())
    tensors = load_file(checkpoint / "model.safetensors")
    rest = {name: x for name, x in tensors.items() if ".experts.5." not in name}
    more = {
        name.replace(".experts.5.", ".experts.6."): x.clone() for name, x in tensors.items() if ".experts.5." in name
    }
    down = "model.layers.0.mlp.experts.{}.down_proj.weight"
    small = {down.format(2): tensors[down.format(2)][:, 1:].clone()}
    for held, problem in (
        (rest, r"has no 'model.layers.0.mlp.experts.5.down_proj.weight': .* 6 experts"),
        ({**tensors, **more}, "has 7 experts of 'model.layers.0.mlp.experts.down_proj', config.json says 6"),
        ({**tensors, **small}, "parameter 'model.layers.0.mlp.experts.down_proj' do not fit each other"),
    ):
        save_file(held, checkpoint / "model.safetensors", {"format": "pt"})
        with pytest.raises(UsageError, match=problem):
            plan_memory(models.make_recipe(checkpoint, limits={"max_length": 160}))


def test_a_router_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["qwen3_moe"]())
    tensors = load_file(checkpoint / "model.safetensors")
    gate = "model.layers.1.mlp.gate"
    for held, problem in (
        ({f"{gate}.e_score_correction_bias": torch.ones(6)}, f"has 1 tensors .*'{gate}.e_score_correction_bias'"),
        ({f"{gate}.weight": torch.zeros(5, 64)}, f"'{gate}.weight' .* has shape .5, 64., the model .* expects .6, 64."),
    ):
        save_file({**tensors, **held}, checkpoint / "model.safetensors", {"format": "pt"})
        with pytest.raises(UsageError, match=problem):
            plan_memory(models.make_recipe(checkpoint, limits={"max_length": 160}))


def test_an_activation_that_the_operator_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(
        tmp_path / "checkpoint", Qwen3MoeConfig(**models.SIZES, **QWEN3, hidden_act="mish")
    )
    with pytest.raises(UsageError, match=r"Qwen3MoeExperts has an activation .* that the operator Experts does not"):
        read_model(models.make_recipe(checkpoint, limits={"max_length": 160}))


@pytest.mark.parametrize(("config", "form"), [
    (CONFIGS["qwen3_moe"], ExpertsForm()),
    (CONFIGS["gpt_oss"], ExpertsForm("silu", slope=1.702, limit=7.0, up_offset=1.0, bias=1)),
    (lambda: Qwen3MoeConfig(**models.SIZES, **QWEN3, hidden_act="gelu_pytorch_tanh"), ExpertsForm("gelu_tanh")),
])  # fmt: skip
def test_the_form_is_read_off_the_module(config: Any, form: ExpertsForm) -> None:
    model = AutoModelForCausalLM.from_config(config())
    assert {experts_form(module) for _, module in expert_modules(model)} == {form}


@pytest.mark.parametrize("layout", [Layout(t, i) for t in (False, True) for i in (False, True)], ids=str)
def test_a_layout_and_its_inverse(layout: Layout) -> None:
    held = torch.arange(2 * 6 * 4.0).reshape(2, 4, 6) if layout.transposed else torch.arange(48.0).reshape(2, 6, 4)
    stored = layout.to_artifact(held)
    assert stored.shape == layout.artifact_shape(tuple(held.shape))
    assert torch.equal(layout.to_module(stored), held)
