"""Tests of weights rounded at build: their error is near the least possible, and an artifact computes with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.errors import UsageError
from kvexport.export.build import plan_memory, read_model
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.gguf import GgufWeight
from kvexport.export.model.tensors import dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.quantize import Rounded, fitting_group, round_groups
from kvexport.export.weights.specs import weight_specs
from kvexport.ops.packed import PackedFormat
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.shards import TensorEntry
from kvexport.validate.runner import validate_artifact
from tests.support.tiny_model import RECIPE

SYMMETRIC = PackedFormat(4, True, 32)
WITH_ZERO = PackedFormat(4, False, 32, "zero")


def entry_of(folder: Path, weight: np.ndarray[Any, Any]) -> TensorEntry:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": weight}, folder / "model.safetensors")
    return read_checkpoint(folder).tensors["w"]


def error(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    return float(((x - y) ** 2).sum() / (x**2).sum())


def test_errors_are_below_those_of_one_scale(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    entry = entry_of(tmp_path, weight)
    rounding_error = error(weight, dense_values(Rounded(entry, SYMMETRIC)))
    groups = weight.reshape(-1, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    scale = (largest / -8).astype(np.float16).astype(np.float32)
    nearest = (np.rint(groups / scale).clip(-8, 7) * scale).reshape(weight.shape)
    assert rounding_error < 0.92 * error(weight, nearest)
    shifted = weight + 3  # values of one sign, for which zero points help
    (tmp_path / "shifted").mkdir()
    entry = entry_of(tmp_path / "shifted", shifted)
    assert error(shifted, dense_values(Rounded(entry, WITH_ZERO))) < 0.5 * error(
        shifted, dense_values(Rounded(entry, SYMMETRIC))
    )
    eight = dense_values(Rounded(entry, PackedFormat(8, True, 32)))
    assert np.abs(eight - shifted).max() <= np.abs(shifted).max() / 128 * 0.51


@pytest.mark.parametrize(
    "packing", [SYMMETRIC, WITH_ZERO, PackedFormat(8, True, 32), PackedFormat(8, False, 32, "zero")]
)
def test_groups_of_nothing_and_of_next_to_nothing_stay_finite(packing: PackedFormat) -> None:
    groups = np.zeros((3, 1, 32), np.float32)
    groups[1] = 1e-30
    groups[2, 0, 5] = -1e-7
    numbers, parts = round_groups(groups, packing)
    assert (parts["scale"] != 0).all()
    zero = parts.get("zero", np.zeros((3, 1)))[..., None].astype(np.float32)
    values = (numbers - zero) * parts["scale"][..., None].astype(np.float32)
    np.testing.assert_allclose(values, groups, atol=6e-8)
    assert not values[0].any()


@pytest.mark.parametrize(("largest", "inputs", "group"), [(32, 96, 32), (128, 576, 64), (256, 64, 64), (64, 40, None)])
def test_groups_that_do_not_divide_are_halved(largest: int, inputs: int, group: int | None) -> None:
    assert fitting_group(largest, inputs) == group


def test_an_artifact_computes_with_the_dequantized_weights(tmp_path: Path, tiny_checkpoint: Path) -> None:
    weights = {"bits": 4, "symmetric": False}  # the head has 8 bits
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tiny_checkpoint)}, "weights": weights})
    artifact = kvexport.build(recipe, tmp_path / "artifact")
    assert validate_artifact(artifact, length=60, batch=1).passed
    size = (artifact / "decoder.weights").stat().st_size
    planned = plan_memory(recipe).weight_bytes
    assert planned <= size < planned + 4096
    assert planned < 0.2 * 82560  # compared with the size in floats
    assert load_manifest(artifact).model.packed == {
        "int8, groups of 32": 1,  # the head, which is the embedding
        "uint4, groups of 32, zero points": 14,
    }


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weight = np.ones((8, 64), np.float32)
    weight[5, 3] = np.nan
    with pytest.raises(UsageError, match="infinite or NaN, the first is number 323 of 512"):
        dense_values(Rounded(entry_of(tmp_path, weight), SYMMETRIC))


def test_weights_that_are_computed_of_floats_are_rounded_as_tensors_are(tiny_checkpoint: Path) -> None:
    """Such weights are a GGUF file's queries and keys, whose rows are in another order, and 8-bit floats."""
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tiny_checkpoint)}, "weights": {"bits": 4}})
    shape = read_model(recipe)
    name = "model.layers.0.self_attn.q_proj.weight"
    entry = shape.checkpoint.tensors[name]
    tensors = {key: tensor for key, tensor in shape.checkpoint.tensors.items() if key != name}
    checkpoint = replace(shape.checkpoint, tensors=tensors, computed={name: GgufWeight(entry)})
    specs = {spec.name: spec for spec in weight_specs(checkpoint, shape.model, recipe)}
    spec = specs[f"model.{name}"]
    assert isinstance(spec, ComputedSpec)
    assert spec.source.packing == SYMMETRIC
    np.testing.assert_array_equal(dense_values(spec.source), dense_values(Rounded(entry, SYMMETRIC)))


def test_scales_above_0_cost_little(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    entry = entry_of(tmp_path, weight)
    free, positive = (Rounded(entry, SYMMETRIC, sign) for sign in (False, True))
    scales = [np.concatenate([block["scale"] for block in of.blocks()]) for of in (free, positive)]
    assert (scales[0] < 0).any() and (scales[1] > 0).all()
    assert error(weight, dense_values(positive)) < 1.2 * error(weight, dense_values(free))
