"""Tests of quantized caches of models whose keys have a large bias, as those of Qwen2 have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, Qwen2Config, Qwen3Config

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.export.build import build, read_model
from kvexport.export.hooks.key_shift import POSITIONS, shifted
from kvexport.methods.primitives.pairs import rotated
from kvexport.methods.slots import Rotary
from kvexport.validate.runner import validate_artifact
from tests.support.models import (
    SIZES,
    given_tokens_logits,
    hugging_face_logits,
    llama,
    make_recipe,
    random_ids,
    save_checkpoint,
)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Qwen2 whose keys, and no queries, have large numbers in the two planes that turn most slowly."""
    folder = save_checkpoint(
        tmp_path_factory.mktemp("biased"),
        Qwen2Config(**SIZES, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    )
    weights = load_file(folder / "model.safetensors")
    for name, x in weights.items():
        if name.endswith("k_proj.bias"):
            x.view(-1, 2, 8)[..., 6:] = 300.0
        elif "q_proj" in name:
            x.view(4, 2, 8, -1)[:, :, 6:] *= 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def error_of(checkpoint: Path, out: Path, dtype: str) -> float:
    """Return the mean error of the full cache's logits, as a part of the largest logit."""
    cache, limits = {"method": "full", "dtype": dtype}, {"max_length": 128}
    recipe = make_recipe(checkpoint, cache=cache, limits=limits, export={"logits": "all"})
    ids = random_ids(0, 90)
    logits = given_tokens_logits(kvexport.load(build(recipe, out)), ids, [70])[0]
    expected = hugging_face_logits(checkpoint, ids)[0]
    return float(np.abs(logits - expected).mean() / np.abs(expected).max())


def without_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvexport.export.model.rotary.key_bias", lambda module: None)


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.1), ("k8v4", 0.3), ("int4", 0.7)])
def test_a_large_bias_takes_no_bits_of_a_quantized_cache(
    biased: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, share: float
) -> None:
    error = error_of(biased, tmp_path / "shifted", dtype)
    without_shift(monkeypatch)
    assert error < share * error_of(biased, tmp_path / "plain", dtype)


def test_an_artifact_past_its_budget_equals_the_reference(biased: Path, tmp_path: Path) -> None:
    cache = {"method": "ballot", "budget": 24, "dtype": "int8", "merge_every": 4, "sinks": 2, "recent": 4}
    limits, export = {"max_length": 160, "max_batch": 2}, {"prefill_chunk": 16}
    build(make_recipe(biased, cache=cache, limits=limits, export=export), tmp_path / "out")
    assert load_manifest(tmp_path / "out").cache.caches[0].key_shift is not None
    result = validate_artifact(tmp_path / "out")
    # Independent runs of a random model part where two slots are nearly worth the same, so only the steps are compared.
    assert len(result.steps) > 10 and not result.mismatches


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_mean_of_the_rotated_bias_is_taken_off(interleaved: bool) -> None:
    rotary = Rotary((1.0, 1e-3, 1e-6), interleaved)
    module = torch.nn.Module()
    module.k_proj = torch.nn.Linear(4, 2 * 8)
    bias = torch.linspace(-3.0, 5.0, 16)
    module.k_proj.bias = torch.nn.Parameter(bias)
    key = torch.randn(1, 2, 5, 8)
    steps = torch.arange(POSITIONS).expand(1, 2, POSITIONS)
    mean = rotated(bias.view(1, 2, 1, 8).expand(1, 2, POSITIONS, 8), steps, rotary).double().mean(2, keepdim=True)
    torch.testing.assert_close(shifted(module, key, rotary), (key - mean).float(), atol=1e-4, rtol=0)
    assert shifted(module, key, None) is key


@pytest.mark.parametrize(
    ("config", "dtype", "method", "taken"),
    [
        (Qwen2Config(**SIZES), "int8", "ballot", True),
        (Qwen2Config(**SIZES), "model", "ballot", False),  # floats keep what a token adds beside the bias
        (Qwen2Config(**SIZES), "int8", "asymkv", False),  # the method rotates keys, and the shift with them
        (llama(), "int8", "ballot", False),  # no bias
        # Keys are normalized after the bias was added.
        (Qwen3Config(**SIZES, head_dim=16, attention_bias=True), "int8", "ballot", False),
        # Learned sink logits are no products of a key.
        (GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1), "int8", "ballot", False),
    ],
)
def test_keys_are_shifted_where_softmax_ignores_it(
    tmp_path: Path, config: Any, dtype: str, method: str, taken: bool
) -> None:
    checkpoint = save_checkpoint(tmp_path / "model", config)
    recipe = make_recipe(checkpoint, cache={"method": method, "dtype": dtype}, limits={"max_length": 512})
    plan = read_model(recipe).plan
    assert [cache.key_shift is not None for cache in plan.caches] == [taken] * 2
