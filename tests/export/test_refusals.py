"""A model that cannot be built is refused with its name and a reason, and leaves no file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import kvexport
from benchmarks.correctness.decoder_configs import tiny
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.recipe.fields import Recipe
from tests.support import models

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32}
# The characteristic part of each refusal's text. The model type precedes it.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "t5": ("T5Config", {}, "is an encoder-decoder"),
    "diffusion_gemma": (
        "DiffusionGemmaConfig",
        tiny(transformers.DiffusionGemmaConfig),
        "computes positions from the length of its cache",
    ),
    "roberta": ("RobertaConfig", {**models.SIZES, "pad_token_id": 1, "is_decoder": True}, "positions in its own way"),
    "bart": (
        "BartConfig",
        {"d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "is_encoder_decoder": False, "is_decoder": True},
        "positions in its own way",
    ),
    "bert": ("BertConfig", {**models.SIZES, "pad_token_id": 0}, "is not causal"),
    "doge": ("DogeConfig", models.SIZES, "computes with its attention mask in code of its own"),
    "minimax": ("MiniMaxConfig", models.SIZES, "keeps its cache in a class of its own"),
    "deepseek_v4": (
        "DeepseekV4Config",
        {"hidden_size": 64, "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100},
        "lets queries see summaries of tokens, made by a compressor",
    ),
    "xlnet": ("XLNetConfig", {"d_model": 64, "n_layer": 2, "n_head": 4}, "attention in its own code"),
    "blip": ("BlipConfig", {}, "needs pixel_values in every call; only models that run on tokens alone"),
    "git": ("GitConfig", {"hidden_size": 64, "num_hidden_layers": 2}, "attention in its own code"),
    "shieldgemma2": ("ShieldGemma2Config", {}, "classifies images, and writes no text"),
    "glm5_next": (
        "Glm5NextConfig",
        {
            "text_config": {
                **models.SIZES,
                "num_key_value_heads": 4,
                "kv_lora_rank": 32,
                "q_lora_rank": 32,
                "layer_types": ["linear_attention", "indexed_attention"],
                "index_kpool_always_select_tail": False,  # queries do not see the latest tokens
            }
        },
        "picks the tokens that a query sees with an indexer",
    ),
    "clip_vision_model": ("CLIPVisionConfig", {}, "transformers has no decoder"),
}


def dummy_checkpoint(folder: Path, config: Any) -> Path:
    """Write a config and one tensor, for refusals that read no weight."""
    config.save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def recipe_for(checkpoint: Path, **sections: Any) -> Recipe:
    sections.setdefault("limits", {"max_length": 64, "max_batch": 2})
    sections.setdefault("cache", {"method": "full"})
    sections.setdefault("export", {"prefill_chunk": 16})
    return models.make_recipe(checkpoint, **sections)


def refusal(checkpoint: Path, start: Callable[[Path], object]) -> UsageError:
    """Return the error of a build that `start` begins at a given path. Check that the build leaves no file."""
    folder = checkpoint.parent / "artifacts"
    folder.mkdir()
    with pytest.raises(UsageError) as caught:
        start(folder / "artifact")
    assert list(folder.iterdir()) == []
    return caught.value


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_cannot_be_exported(tmp_path: Path, kind: str) -> None:
    name, changes, reason = MODELS[kind]
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", getattr(transformers, name)(**changes))
    error = refusal(checkpoint, lambda out: build(recipe_for(checkpoint), out))
    assert kind in error.problem
    assert reason in error.problem
    assert "\n" not in error.problem


def test_a_config_of_no_model_is_refused(tmp_path: Path) -> None:
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", models.llama())
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "hidden_act": "no-such-activation"}))
    error = refusal(checkpoint, lambda out: build(recipe_for(checkpoint), out))
    assert "transformers cannot make a llama" in error.problem
    assert "no-such-activation" in error.problem


def test_integers_in_a_checkpoint_are_refused_if_a_token_reads_them(tmp_path: Path, monkeypatch: Any) -> None:
    from transformers.models.llama import modeling_llama

    class Router(modeling_llama.LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("table", torch.arange(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (self.table if reads else 1)

    reads = False
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Router)
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", models.llama())
    read_model(recipe_for(checkpoint), weights=False)
    reads = True
    with pytest.raises(UsageError, match=r"keeps integers in its checkpoint \('model.layers.0.mlp.table', torch.int64"):
        read_model(recipe_for(checkpoint), weights=False)


def test_a_state_in_code_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, **options: (hidden_states, None))
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", models.llama())
    with pytest.raises(UsageError, match="llama has layers without attention, whose state it keeps in code of its own"):
        read_model(recipe_for(checkpoint), weights=False)


def test_rotary_frequencies_of_the_longest_sequence_are_announced() -> None:
    from kvexport.export.model.hf_model import length_notes

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = transformers.Phi3Config(**models.SIZES, original_max_position_embeddings=32, rope_parameters=rope)
    assert length_notes(config, 32) == []
    assert length_notes(models.llama(), 512) == []
    [note] = length_notes(config, 128)
    assert "sequences of up to 32 tokens differ from transformers; with --set limits.max_length=32 they do not" in note


def test_an_unknown_model_type(tmp_path: Path) -> None:
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", models.llama())
    (checkpoint / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "no_such_model" in refusal(checkpoint, lambda out: build(recipe_for(checkpoint), out)).problem


# Checkpoints that do not fit, and recipes with impossible settings.


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_checkpoint(tmp_path_factory.mktemp("weights") / "checkpoint", models.llama(num_hidden_layers=1))


@pytest.fixture
def checkpoint(weights: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(weights, tmp_path / "checkpoint"))


def test_more_positions_than_the_model_has(checkpoint: Path) -> None:
    recipe = recipe_for(checkpoint, limits={"max_length": 513, "max_batch": 1})
    error = refusal(checkpoint, lambda out: build(recipe, out))
    assert error.problem == "limits.max_length is 513, but llama has 512 positions"
    assert error.fix == "--set limits.max_length=512, or --set cache.positions=cache"


def test_more_positions_than_the_text_part_has(tmp_path: Path) -> None:
    config = transformers.Gemma3Config(text_config={**models.SIZES, "head_dim": 16})
    checkpoint = dummy_checkpoint(tmp_path / "checkpoint", config)
    recipe = recipe_for(checkpoint, limits={"max_length": 513, "max_batch": 1})
    assert "has 512 positions" in refusal(checkpoint, lambda out: build(recipe, out)).problem


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)


def test_missing_tensors(checkpoint: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("up", "down"):
            del tensors[f"model.layers.0.mlp.{name}_proj.weight"]

    rewrite(checkpoint, drop)
    error = refusal(checkpoint, lambda out: build(recipe_for(checkpoint), out))
    assert "no tensor for 2 parameters of the model, the first is 'model.layers.0.mlp.up_proj.weight'" in error.problem
    assert "save_pretrained()" in error.fix


def test_a_tensor_of_another_shape(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    error = refusal(checkpoint, lambda out: build(recipe_for(checkpoint), out))
    assert name in error.problem
    assert "has shape [64, 64], the model of config.json expects [32, 64]" in error.problem


def test_a_budget_without_room_for_a_slot_that_may_leave(checkpoint: Path) -> None:
    cache = {"method": "keepkv", "budget": 12, "sinks": 4, "recent": 8, "merge_every": 4}
    error = refusal(checkpoint, lambda out: build(recipe_for(checkpoint, cache=cache), out))
    assert "layer 0 has a budget of 12 slots, which cannot hold 4 sinks, 8 recent and one more" in error.problem
    assert "--set cache.budget=13" in error.fix
    assert read_model(recipe_for(checkpoint, cache={**cache, "budget": 13})).plan.caches[0].budget[0] == 13


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"slack": 15, "merge_every": 4}, "cache.slack 15 is smaller than max(prefill_chunk, merge_every) = 16"),
        ({"slack": 20, "merge_every": 32}, "cache.slack 20 is smaller than max(prefill_chunk, merge_every) = 32"),
    ],
)
def test_less_slack_than_a_call_needs(checkpoint: Path, changes: dict[str, Any], problem: str) -> None:
    file = checkpoint.parent / "recipe.yaml"
    cache = {"method": "keepkv", "budget": 32, **changes}
    file.write_text(
        yaml.safe_dump({"model": {"path": str(checkpoint)}, "cache": cache, "export": {"prefill_chunk": 16}})
    )
    error = refusal(checkpoint, lambda out: kvexport.build(file, out))
    assert problem in str(error)


def test_a_refused_build_keeps_the_artifact_that_was_there(
    tiny_recipe: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    before = {file.name: file.read_bytes() for file in artifact.iterdir() if file.is_file()}
    with pytest.raises(UsageError, match="512 positions"):
        kvexport.build(tiny_recipe, artifact, ["limits.max_length=1000"])
    assert {file.name: file.read_bytes() for file in artifact.iterdir() if file.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
