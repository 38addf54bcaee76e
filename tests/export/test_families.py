"""Families of decoders: with a budget for the whole sequence, an artifact's logits equal Hugging Face's."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.export.build import build
from kvexport.methods import all_methods
from tests.support import models
from tests.support.tensorrt_walk import artifact_problems

WINDOW = 24
CHUNK = 32
# Prompts of one, two and three chunks, then decode steps, the fewest for the second sequence. The longest sequence is
# four times the window and stays within the budget.
PROMPTS = (20, 50, 90)
LENGTHS = (50, 60, 115)
MAX_LENGTH = 160
TOLERANCE = 1e-4
MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A config, the window of every layer, and the form of its checkpoint."""

    config: Callable[..., Any]
    changes: dict[str, Any]
    windows: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"


FAMILIES = {
    "apertus": Family(hf.ApertusConfig, {}),
    "llama": Family(hf.LlamaConfig, {}),
    "mistral": Family(hf.MistralConfig, {"sliding_window": WINDOW}, windows=(WINDOW, WINDOW)),
    "qwen2": Family(hf.Qwen2Config, {}),
    "gemma2": Family(
        hf.Gemma2Config,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": MIXED,
         "attn_logit_softcapping": 5.0}, windows=(WINDOW, 0),
    ),
    "qwen3": Family(hf.Qwen3Config, {"head_dim": 16}, dtype=torch.bfloat16),
    "gemma3": Family(
        hf.Gemma3TextConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": MIXED},
        windows=(WINDOW, 0),
    ),
    "phi3": Family(hf.Phi3Config, {}, shard="60KB"),
}  # fmt: skip
# These families use what the other families test, so they are tested only without compression. gpt_neox renames its
# tensors and rotates a quarter of a head, gpt2 learns its positions and stores weights transposed, granite has
# multipliers everywhere, and Phi-3's long form has frequencies that depend on the length.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GEMMA4 = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 100}
TAIL = {
    "gpt_neox": Family(hf.GPTNeoXConfig, {}),
    "gpt2": Family(
        hf.GPT2Config,
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "stablelm": Family(hf.StableLmConfig, {"partial_rotary_factor": 0.25}),
    "granite": Family(
        hf.GraniteConfig,
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "gemma4": Family(
        hf.Gemma4TextConfig,
        {"layer_types": MIXED, "sliding_window": WINDOW, "head_dim": 16, "global_head_dim": 32, **GEMMA4},
        windows=(WINDOW, 0),
    ),
    "gemma3-longrope": Family(
        hf.Gemma3TextConfig,
        {"layer_types": MIXED, "sliding_window": WINDOW, "head_dim": 16,
         "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
          "full_attention": {**LONGROPE, "original_max_position_embeddings": 32, "factor": 16.0}}}, windows=(WINDOW, 0),
    ),
    "phi3-longrope": Family(
        hf.Phi3Config,
        {
            "original_max_position_embeddings": 32,  # shorter than all sequences here
            "rope_parameters": LONGROPE,
        },
    ),
}  # fmt: skip
# Only in float16: norms that scale in float32. The models have one layer whose attention is like qwen3's, so that they
# share its function.
ONE_LAYER = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
HALF = {
    "gemma2-half": Family(hf.Gemma2Config, {**ONE_LAYER, "attn_logit_softcapping": None}),
    "gemma3-half": Family(hf.Gemma3TextConfig, ONE_LAYER, dtype=torch.bfloat16),
}


def cases() -> list[tuple[str, str]]:
    """Return every family with `full` and `keepkv`, and every other method with two families."""
    pairs = list(itertools.product(FAMILIES, ("full", "keepkv")))
    windowed = itertools.cycle(name for name, family in FAMILIES.items() if any(family.windows))
    plain = itertools.cycle(name for name, family in FAMILIES.items() if not any(family.windows))
    for method, kind in all_methods().items():
        if method not in ("full", "keepkv") and not kind().extra_state:
            pairs += [(next(plain), method), (next(windowed), method)]
    return pairs


class Workshop:
    """Checkpoints and Hugging Face's logits, made once per family for all methods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sequences = models.random_ids(1, *LENGTHS)
        self._expected: dict[str, list[models.Logits]] = {}

    def checkpoint(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            family = (FAMILIES | TAIL | HALF)[name]
            sizes = models.SIZES if family.config is not hf.GPT2Config else {"vocab_size": models.SIZES["vocab_size"]}
            models.save_checkpoint(
                path, family.config(**{**sizes, **family.changes}), dtype=family.dtype, shard=family.shard
            )
        return path

    def expected(self, name: str) -> list[models.Logits]:
        if name not in self._expected:
            self._expected[name] = models.hugging_face_logits(self.checkpoint(name), self.sequences)
        return self._expected[name]

    def engine(self, name: str, method: str, dtype: str = "float32") -> Engine:
        recipe = models.make_recipe(
            self.checkpoint(name),
            dtype=dtype,
            # The same number of slots as `full` has, so that all methods share one trace. `recent` is a number of
            # slots, so that layers share functions.
            cache={
                "method": method,
                "budget": MAX_LENGTH - CHUNK,
                "slack": CHUNK,
                "recent": 8,
                "merge_every": 8,
                "allocation": {"kind": "uniform"},
            },
            export={"prefill_chunk": CHUNK, "logits": "all"},
            limits={"max_length": MAX_LENGTH, "max_batch": 3},
        )
        artifact = build(recipe, self.folder / f"{name}-{method}-{dtype}")
        assert not artifact_problems(artifact)  # TensorRT's parser accepts all nodes
        return load(artifact)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("families"))


def difference(got: list[models.Logits], expected: list[models.Logits]) -> float:
    assert [len(g) for g in got] == list(LENGTHS)
    assert max(np.abs(e).max() for e in expected) > 1.0
    return float(max(np.abs(g - e).max() for g, e in zip(got, expected, strict=True)))


@pytest.mark.parametrize(("name", "method"), sorted(cases()))
def test_budget_beyond_the_length_equals_hugging_face(workshop: Workshop, name: str, method: str) -> None:
    engine = workshop.engine(name, method)
    assert tuple(layer.sliding_window for layer in engine.plan.caches) == FAMILIES[name].windows
    merged: set[int] = set()

    def count_slots(lanes: Any) -> None:
        for i, layer in enumerate(engine.plan.caches):
            votes = lanes.state.state[f"past_key_values.{i}.votes"]
            used = (votes.reshape(len(votes), layer.kv_heads, -1) > 0).sum(-1)
            assert used.max() <= layer.capacity[0]
            if used.max() < max(lanes.length):
                merged.add(i)

    actual = models.given_tokens_logits(engine, workshop.sequences, PROMPTS, count_slots)
    assert difference(actual, workshop.expected(name)) <= TOLERANCE
    # Only layers with a window can have dropped a slot.
    assert merged == {i for i, window in enumerate(FAMILIES[name].windows) if window}


@pytest.mark.parametrize("name", TAIL)
def test_longer_tail_of_families_equals_hugging_face(workshop: Workshop, name: str) -> None:
    actual = models.given_tokens_logits(workshop.engine(name, "full"), workshop.sequences, PROMPTS)
    assert difference(actual, workshop.expected(name)) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", *HALF])
def test_checkpoint_becomes_float16(workshop: Workshop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = workshop.expected(name)
    largest = max(np.abs(e).max() for e in expected)
    artifact = workshop.engine(name, "full", "float16").path
    for native in (True, False):  # if they are built
        if not native:
            monkeypatch.setenv("KVEXPORT_OPERATORS", "off")
        engine = load(artifact)
        assert {str(layer.dtype) for layer in engine.plan.caches} == {"float16"}
        assert engine.new_state(1).state["past_key_values.0.key"].dtype == np.float16
        actual = models.given_tokens_logits(engine, workshop.sequences, PROMPTS)
        # Rounding is the only difference.
        assert 0 < difference(actual, expected) <= 1e-2 * largest


def test_tied_embeddings_are_stored_once(workshop: Workshop) -> None:
    checkpoint = workshop.checkpoint("gemma2")
    artifact = workshop.engine("gemma2", "full").path
    embedding = 4 * models.SIZES["vocab_size"] * models.SIZES["hidden_size"]
    stored = (checkpoint / "model.safetensors").stat().st_size
    assert (artifact / "decoder.weights").stat().st_size < stored + embedding // 2


def test_the_sharded_checkpoint_has_several_files(workshop: Workshop) -> None:
    assert len(list(workshop.checkpoint("phi3").glob("*.safetensors"))) > 2
