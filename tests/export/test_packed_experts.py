"""Experts that a quantized checkpoint packs one by one stay packed in one weight, and none of their numbers changes."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file
from transformers import MixtralConfig, Qwen3MoeConfig

from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.model.tensors import PackedExperts, dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_notes, weight_specs
from kvexport.ops.packed import E2M1
from tests.support import models
from tests.support.quantized_files import Made, awq, gptq, quantized, words

CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **models.SIZES, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "mixtral": lambda: MixtralConfig(**models.SIZES, num_local_experts=4, num_experts_per_tok=2),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
}
NVFP4 = {**COMPRESSED, "format": "nvfp4-pack-quantized", "config_groups": {}}
HALVES = np.array(E2M1) / 2


def compressed(n: int, k: int, seed: int, *, group: int = 16) -> Made:
    rng = np.random.default_rng(seed)
    numbers, scale = rng.integers(-8, 8, (n, k)), (rng.random((n, k // group)) * 0.02 + 0.01).astype(np.float16)
    stored = {"weight_packed": words(numbers + 8, 4), "weight_scale": scale, "weight_shape": np.array([n, k], np.int64)}
    return stored, (numbers * np.repeat(scale.astype(np.float32), group, 1)).astype(np.float32)


def nvfp4(n: int, k: int, seed: int) -> Made:
    """Return a weight in compressed-tensors' NVFP4: 4-bit floats, an E4M3 scale per 16 inputs, one scale per tensor."""
    rng = np.random.default_rng(seed)
    stored = rng.integers(0, 256, (n, k // 2), np.uint8)
    scale = torch.from_numpy(rng.random((n, k // 16)) + 0.5).to(torch.float8_e4m3fn)
    total = np.array([64.0], np.float32)
    numbers = HALVES[np.stack([stored & 15, stored >> 4], -1).reshape(n, k)]
    values = numbers * np.repeat(scale.float().numpy() / total, 16, 1)
    parts = {"weight_packed": stored, "weight_scale": scale.view(torch.uint8).numpy(), "weight_global_scale": total}
    return parts, values.astype(np.float32)


def packed_checkpoint(folder: Path, name: str, config: dict[str, Any], make: Any) -> tuple[Path, dict[str, Any]]:
    """Write a tiny checkpoint with packed projections and experts, and return it with the values of its tensors."""
    plain = models.save_checkpoint(folder / "plain", CONFIGS[name]())
    values = quantized(plain, folder / "packed", config, make)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    file = folder / "packed" / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    floats = {n: x.view(torch.float8_e4m3fn) for n, x in stored.items() if make is nvfp4 and n.endswith("weight_scale")}
    safetensors.torch.save_file(stored | floats, file, {"format": "pt"})
    return folder / "packed", values


def specs_of(checkpoint: Path) -> tuple[Any, Any, dict[str, ComputedSpec]]:
    """Return the recipe, the model, and the specs of the weights of its experts by name."""
    recipe = models.make_recipe(checkpoint, limits={"max_length": 160})
    shape = read_model(recipe)
    specs = weight_specs(shape.checkpoint, shape.model, recipe)
    experts = {spec.name: spec for spec in specs if isinstance(spec, ComputedSpec) and ".experts." in spec.name}
    return recipe, shape, experts


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("config", "make", "label"),
    [
        (GPTQ, partial(gptq, symmetric=True), "int4, groups of 16"),
        (AWQ, awq, "uint4, groups of 16, zero points"),
        ({**GPTQ, "bits": 8}, partial(gptq, bits=8), "uint8, groups of 16, zero points"),
        (COMPRESSED, compressed, "int4, groups of 16"),
        (NVFP4, nvfp4, "float4 e2m1 (4 bits), groups of 16"),
    ],
    ids=["gptq", "awq", "gptq, 8 bits", "compressed-tensors", "nvfp4"],
)
def test_experts_stay_as_they_were_packed(
    name: str, config: dict[str, Any], make: Any, label: str, tmp_path: Path
) -> None:
    checkpoint, values = packed_checkpoint(tmp_path, name, config, make)
    _, _, experts = specs_of(checkpoint)
    assert len(experts) == 4
    gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if name == "mixtral" else "mlp"
    for title, spec in experts.items():
        assert isinstance(spec.source, PackedExperts) and spec.source.packing is not None
        assert spec.source.packing.label == label
        layer, count = title.split(".layers.")[1][0], spec.shape[0]
        own = [f"model.layers.{layer}.{block}.experts.{e}" for e in range(count)]
        parts = [down] if title.endswith("down_proj") else [gate, up]
        expected = np.concatenate([values[f"{expert}.{part}.weight"] for expert in own for part in parts])
        np.testing.assert_array_equal(dense_values(spec.source), expected)


@pytest.mark.parametrize(("config", "make"), [(AWQ, awq), (NVFP4, nvfp4)], ids=["awq", "nvfp4"])
def test_an_artifact_computes_with_the_dequantized_experts(config: dict[str, Any], make: Any, tmp_path: Path) -> None:
    checkpoint, _ = packed_checkpoint(tmp_path, "qwen3_moe", config, make)
    export = {"logits": "all", "prefill_chunk": 32}
    recipe = models.make_recipe(checkpoint, export=export, limits={"max_length": 160})
    artifact = build(recipe, tmp_path / "artifact")
    models.assert_logits_of_transformers(load(artifact, float_input=True), tmp_path / "plain")
    graph = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph
    kinds = {x.name: x.data_type for x in graph.initializer if x.name.endswith(("gate_up_proj", "down_proj"))}
    assert {kind for name, kind in kinds.items() if ".experts." in name} == {onnx.TensorProto.UINT4}


def test_experts_with_ordered_columns_become_floats_with_a_note(tmp_path: Path) -> None:
    checkpoint, expected = packed_checkpoint(tmp_path, "qwen3_moe", GPTQ, partial(gptq, act_order=True))
    recipe, shape, experts = specs_of(checkpoint)
    assert {spec.source.packing for spec in experts.values()} == {None}
    down = experts["model.model.layers.0.mlp.experts.down_proj"]
    first = expected["model.layers.0.mlp.experts.0.down_proj.weight"]
    np.testing.assert_array_equal(next(down.source.blocks())["weight"], first)
    (note,) = [
        note for note in weight_notes(shape.checkpoint, shape.model, recipe, [*experts.values()]) if "experts" in note
    ]
    assert "cast to float32, because experts are not kept in the format uint4" in note and "order" in note


def test_a_packed_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint, _ = packed_checkpoint(tmp_path, "qwen3_moe", AWQ, awq)
    file = checkpoint / "model.safetensors"
    gone = "model.layers.1.mlp.experts.3.up_proj."
    save_file({n: x for n, x in load_file(file).items() if not n.startswith(gone)}, file, {"format": "pt"})
    with pytest.raises(UsageError, match=f"the checkpoint has no '{gone}weight'"):
        specs_of(checkpoint)
