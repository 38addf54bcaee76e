"""Tensors of a checkpoint that its config.json does not announce are refused by name, unless they have no effect."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvexport.errors import UsageError
from kvexport.export.build import plan_memory, read_model
from kvexport.export.model.conversion import refuse_unexpected
from tests.support import models

LAYER = "model.layers.0"
BIAS, NORM = f"{LAYER}.mlp.gate_proj.bias", f"{LAYER}.self_attn.q_norm.weight"


def checkpoint_with(folder: Path, tensors: dict[str, torch.Tensor], config: Any = None) -> Any:
    checkpoint = models.save_checkpoint(folder / "checkpoint", config or models.llama())
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    return models.make_recipe(checkpoint, limits={"max_length": 160})


def outside(recipe: Any) -> list[str]:
    shape = read_model(recipe)
    return refuse_unexpected(shape.model, shape.checkpoint)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({BIAS: (128,)}, f"has 1 tensors .*: '{BIAS}'\n"),
        ({NORM: (16,)}, f"has 1 tensors .*: '{NORM}'\n"),
        ({"model.layers.7.input_layernorm.weight": (64,)}, r"'model.layers.7.input_layernorm.weight'"),
        ({"model.embed_norm.weight": (64,)}, r"'model.embed_norm.weight'"),
        ({"lm_head.bias": (96,)}, r"'lm_head.bias'"),
        (
            {f"model.layers.{i}.mlp.up_proj.bias": (128,) for i in range(2)} | {BIAS: (128,), NORM: (16,)},
            "has 4 tensors .*'model.layers.0.mlp.gate_proj.bias', 'model.layers.0.mlp.up_proj.bias', .* and 1 more",
        ),
    ],
)
def test_weights_of_the_decoder_that_config_json_does_not_announce_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], problem: str
) -> None:
    recipe = checkpoint_with(tmp_path, {name: torch.ones(shape) for name, shape in tensors.items()})
    with pytest.raises(UsageError, match=problem):
        plan_memory(recipe)


def test_tensors_without_an_effect_are_left_out(tmp_path: Path) -> None:
    harmless = {
        BIAS: torch.zeros(128),
        f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(8),
        f"{LAYER}.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        f"{LAYER}.self_attn.rotary_emb.cos_cached": torch.ones(8, 16),
        f"{LAYER}.self_attn.masked_bias": torch.tensor(-1e9),
        f"{LAYER}.self_attn.k_scale": torch.ones(1),
        f"{LAYER}.mlp.bias": torch.ones(1, 1, 8, 8),
        "model.mtp_layers.0.input_proj.weight": torch.ones(64, 128),
        "model.position_ids": torch.arange(8)[None],
    }
    assert not outside(checkpoint_with(tmp_path, harmless))


def test_parts_beside_the_decoder_are_named(tmp_path: Path) -> None:
    assert outside(checkpoint_with(tmp_path, {"v_head.summary.weight": torch.ones(1, 64)})) == ["v_head.summary.weight"]


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    layers = models.SIZES["num_hidden_layers"]
    drafted = {f"model.layers.{layers}.eh_proj.weight": torch.ones(64, 128)}
    config = models.llama(num_nextn_predict_layers=1)
    assert not outside(checkpoint_with(tmp_path, drafted, config))
    config.num_nextn_predict_layers = 0
    with pytest.raises(UsageError, match="eh_proj"):
        outside(checkpoint_with(tmp_path / "announced", drafted, config))


def test_a_quantizers_scales_are_left_out_but_those_of_activations(tmp_path: Path) -> None:
    """AWQ divides the outputs of some activations by scales of their own."""
    for name, refused in (("input_scale", False), ("scales", True)):
        recipe = checkpoint_with(tmp_path / name, {f"{LAYER}.mlp.gate_proj.{name}": torch.ones(1)})
        shape = read_model(recipe)
        packed = dataclasses.replace(shape.checkpoint, computed={"model.norm.weight": None})
        if not refused:
            assert not refuse_unexpected(shape.model, packed)
            continue
        with pytest.raises(UsageError, match=r"gate_proj\.scales"):
            refuse_unexpected(shape.model, packed)
