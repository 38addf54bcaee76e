"""Tests of AWQ's scales: products are nearer to the model's, and a norm is only scaled if nothing else reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers import Gemma2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvexport.errors import UsageError
from kvexport.export.build import read_model
from kvexport.export.model.tensors import dense_values
from kvexport.export.weights import importance
from kvexport.export.weights.awq import SUFFIX, ScaledNorm
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.importance import FILE, weigh
from kvexport.export.weights.quantize import Rounded
from kvexport.export.weights.specs import weight_specs
from kvexport.recipe.fields import Recipe
from kvexport.validate.runner import validate_artifact
from tests.support import models
from tests.support.tiny_model import RECIPE, make_checkpoint


def spread(folder: Path) -> Path:
    """Give a checkpoint norms in which some channels matter far more than others, as in trained models."""
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, x in tensors.items():
        if x.ndim == 1:
            tensors[name] = (x * rng.lognormal(0, 1, x.shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spread(make_checkpoint(tmp_path_factory.mktemp("awq") / "checkpoint"))


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> Path:
    file = checkpoint.parent / "text.txt"
    file.write_text("".join(np.random.default_rng(0).choice(list("abcdefghij klmnop"), 2500)))
    return file


def recipe_of(checkpoint: Path, text: Path, **weights: Any) -> Recipe:
    fields = {"bits": 4, "method": "awq", "calibration": str(text), **weights}
    return Recipe.model_validate({**RECIPE, "model": {"path": str(checkpoint)}, "weights": fields})


def sources(recipe: Recipe) -> dict[str, Any]:
    """Return the sources that rounding and its scales change, by tensor."""
    shape = read_model(recipe)
    specs = weigh(weight_specs(shape.checkpoint, shape.model, recipe), shape.checkpoint, recipe)
    computed = [spec.source for spec in specs if isinstance(spec, ComputedSpec)]
    return {source.name: source for source in computed if isinstance(source, Rounded | ScaledNorm)}


def test_a_norm_divides_by_the_factors_of_its_projections(checkpoint: Path, text: Path) -> None:
    changed = sources(recipe_of(checkpoint, text))
    norms = {name for name, source in changed.items() if isinstance(source, ScaledNorm)}
    of = ("input_layernorm", "post_attention_layernorm")
    assert norms == {f"model.layers.{i}.{norm}.weight" for i in range(2) for norm in of}
    held = load_file(checkpoint / "model.safetensors")
    for i in range(2):
        for norm, projections in zip(of, (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                                          ["mlp.gate_proj", "mlp.up_proj"]), strict=True):  # fmt: skip
            name = f"model.layers.{i}.{norm}.weight"
            scales = {changed[f"model.layers.{i}.{x}.weight"].channels for x in projections}
            (scale,) = (np.frombuffer(x, np.float32) for x in scales)
            np.testing.assert_allclose(dense_values(changed[name]) * scale, held[name], rtol=1e-6)
            assert scale.max() > 1.2 * scale.min()
    others = [name for name, source in changed.items() if isinstance(source, Rounded) and not source.channels]
    assert {name.split(".")[-2] for name in others} == {"o_proj", "down_proj", "embed_tokens"}


def test_products_are_nearer_than_by_importance_alone(checkpoint: Path, text: Path) -> None:
    scaled, plain = (sources(recipe_of(checkpoint, text, method=method)) for method in ("awq", "importance"))
    held = load_file(checkpoint / "model.safetensors")
    ratios = []
    for name, source in scaled.items():
        if isinstance(source, Rounded) and source.channels:
            matter = np.frombuffer(plain[name].importance, np.float32)
            norm_values = dense_values(source) / np.frombuffer(source.channels, np.float32)
            errors = [
                ((values - held[name]) ** 2 * matter).sum() for values in (norm_values, dense_values(plain[name]))
            ]
            ratios.append(errors[0] / errors[1])
    assert len(ratios) == 10 and np.mean(ratios) < 0.97


def test_an_artifact_is_validated_and_repeated_by_the_file_that_it_holds(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(checkpoint, text)
    artifact = models.build_shared(recipe, tmp_path / "artifact")
    expected = sources(recipe)
    monkeypatch.setattr(importance, "_pieces", None)  # without the text
    assert sources(recipe_of(checkpoint, artifact / FILE)) == expected
    assert validate_artifact(artifact, length=60, batch=1).passed
    with pytest.raises(UsageError, match="method awq, not importance") as caught:
        sources(recipe_of(checkpoint, artifact / FILE, method="importance"))
    assert caught.value.fix == "--set weights.method=awq"
    held = load_file(artifact / FILE)
    name = f"model.layers.0.input_layernorm.weight{SUFFIX}"
    for values in (np.ones((2, 31), np.float32), np.full((2, 32), np.inf, np.float32), np.zeros((2, 32), np.float32)):
        save_file({**held, name: values}, tmp_path / "other.safetensors")
        with pytest.raises(UsageError, match=r"other.safetensors has float32 \[2, \d+\] for AWQ's scales of tensor"):
            sources(recipe_of(checkpoint, tmp_path / "other.safetensors"))
    save_file({name: x for name, x in held.items() if SUFFIX not in name}, tmp_path / "plain.safetensors")
    with pytest.raises(UsageError, match="method importance, not awq"):
        sources(recipe_of(checkpoint, tmp_path / "plain.safetensors"))


def test_a_norm_that_adds_1_takes_scales_as_well(tmp_path: Path, text: Path) -> None:
    """Norms of Gemma, which multiply by 1 + weight, are scaled too, except those that no projection reads."""
    config = Gemma2Config(**{**models.SIZES, "vocab_size": 64, "head_dim": 16, "query_pre_attn_scalar": 16})
    folder = models.save_checkpoint(tmp_path / "checkpoint", config)
    (folder / "tokenizer.json").write_bytes((text.parent / "checkpoint" / "tokenizer.json").read_bytes())
    changed = sources(recipe_of(spread(folder), text))
    held = load_file(folder / "model.safetensors")
    norms = {name: source for name, source in changed.items() if isinstance(source, ScaledNorm)}
    assert {name.split(".")[-2] for name in norms} == {"input_layernorm", "pre_feedforward_layernorm"}
    read = {"input_layernorm": "self_attn.q_proj", "pre_feedforward_layernorm": "mlp.up_proj"}
    for name, source in norms.items():
        above, norm = name.removesuffix(".weight").rsplit(".", 1)
        scale = np.frombuffer(changed[f"{above}.{read[norm]}.weight"].channels, np.float32)
        np.testing.assert_allclose((1 + dense_values(source)) * scale, 1 + held[name], rtol=1e-5, atol=1e-6)


def reads_twice(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Compute a layer whose residuals read its norms too."""
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    normed = self.post_attention_layernorm(normed + attended)
    output: torch.Tensor = normed + self.mlp(normed)
    return output


@pytest.fixture
def read_twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(LlamaDecoderLayer, "forward", reads_twice)
    yield


def test_a_norm_with_other_readers_is_not_scaled(read_twice: None, checkpoint: Path, text: Path) -> None:
    with pytest.raises(UsageError, match="is read by rounded projections alone") as caught:
        sources(recipe_of(checkpoint, text))
    assert caught.value.fix == "--set weights.method=importance"


def test_a_module_that_is_no_norm_is_not_scaled(checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that does not multiply by its weight is not scaled."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: nn.functional.silu(x) * self.weight**2)
    with pytest.raises(UsageError, match="no norm of"):
        sources(recipe_of(checkpoint, text))
