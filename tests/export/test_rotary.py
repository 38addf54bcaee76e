"""Tests of reading a model's rotary embedding."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from transformers import Cohere2Config, Gemma3TextConfig, Glm4Config, GPT2Config, LlamaConfig, PhiConfig, SmolLM3Config
from transformers.models.llama import modeling_llama

from kvexport.artifact.reading import load_manifest
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.export.model.hf_model import build_fake
from kvexport.export.model.probe import probe_layers
from kvexport.export.model.rotary import read_rotary
from kvexport.methods.slots import Rotary
from kvexport.validate.runner import validate_artifact
from tests.support.models import make_recipe

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip


def rotary_of(config: Any) -> list[Rotary]:
    model, mode = build_fake(config, torch.float32, 256)
    return [layer.rotary for layer in read_rotary(model, mode, probe_layers(model, mode).geometry)]


def frequencies(base: float, size: int) -> list[float]:
    return [base ** (-2 * f / size) for f in range(size // 2)]


def test_llama_turns_halves_of_the_whole_head() -> None:
    for rotary in rotary_of(LlamaConfig(**SIZES)):
        assert not rotary.interleaved
        assert rotary.inverse_frequencies == pytest.approx(frequencies(10000.0, 16))


def test_phi_rotates_the_first_dimensions_only() -> None:
    config = PhiConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    )
    assert [len(rotary.inverse_frequencies) for rotary in rotary_of(config)] == [4, 4]


def test_glm4_interleaves_and_rotates_half() -> None:
    first, _ = rotary_of(Glm4Config(**SIZES, head_dim=16))
    assert first.interleaved
    assert first.inverse_frequencies == pytest.approx(frequencies(10000.0, 8))


def test_gemma3_has_frequencies_of_its_own_in_sliding_layers() -> None:
    sliding, full = rotary_of(
        Gemma3TextConfig(**SIZES, head_dim=16, layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    )
    assert sliding.inverse_frequencies == pytest.approx(frequencies(10000.0, 16))
    assert full.inverse_frequencies == pytest.approx(frequencies(1000000.0, 16))


def test_scaled_frequencies_are_those_of_the_longest_sequence() -> None:
    scaling = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    first, _ = rotary_of(LlamaConfig(**SIZES, rope_parameters=scaling))
    assert first.inverse_frequencies == pytest.approx([f / 4 for f in frequencies(10000.0, 16)])


def test_layers_without_rotary_embedding_rotate_nothing() -> None:
    rotating, still = rotary_of(SmolLM3Config(**SIZES, no_rope_layers=[1, 0]))
    assert len(rotating.inverse_frequencies) == 8
    assert still == Rotary()
    sliding, full = rotary_of(
        Cohere2Config(**SIZES, layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    )
    assert sliding.interleaved
    assert full == Rotary()


def test_models_of_learned_positions_rotate_nothing() -> None:
    assert rotary_of(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=512)) == [Rotary(), Rotary()]


def test_an_embedding_that_is_no_fixed_rotation_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def stretched(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        q, k = modeling_llama_apply(q, k, cos, sin, unsqueeze_dim)
        return q, k * (2.0 + cos.unsqueeze(unsqueeze_dim))

    modeling_llama_apply = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stretched)
    with pytest.raises(
        UsageError, match=r"llama: this method rotates keys.*not rotated by position times fixed frequencies"
    ):
        rotary_of(LlamaConfig(**SIZES))
    assert modeling_llama.apply_rotary_pos_emb is stretched, "the model's function is restored"


def test_an_artifact_that_rotates_keys_carries_the_frequencies_and_passes_validation(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    cache = {"method": "kvslimmer", "budget": 32, "recent": 0.25, "merge_every": 4}
    recipe = make_recipe(
        tiny_checkpoint, cache=cache, export={"prefill_chunk": 16}, limits={"max_length": 512, "max_batch": 4}
    )
    artifact = build(recipe, tmp_path / "artifact")
    saved = load_manifest(artifact).cache.caches[0].rotary
    assert saved.inverse_frequencies == pytest.approx(frequencies(10000.0, 8))
    nodes = onnx.load(artifact / "merge.onnx").graph.node
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes["inverse_frequencies"] == pytest.approx(saved.inverse_frequencies)
        assert attributes["rotary_interleaved"] == 0
    assert validate_artifact(artifact, length=96).passed
