"""Decoders with latent attention: the cache has one KV head of latents, and the logits equal Hugging Face's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, MiniCPM3Config

from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime.operators import VARIABLE, implementations
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.hooks.latent import check_expansions
from kvexport.methods import all_methods
from tests.support import models
from tests.support.schedules import Alone, Schedule

RANK, ROTATED = 32, 8
LATENT: dict[str, Any] = {
    **models.SIZES, "num_key_value_heads": 4, "kv_lora_rank": RANK, "q_lora_rank": 24, "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": 12, "v_head_dim": 16,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
CONFIGS = {
    "minicpm3": lambda: MiniCPM3Config(**LATENT),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT, **EXPERTS, first_k_dense_replace=1),
}


def recipe_of(checkpoint: Path, budget: float | int, method: str, **changes: Any) -> Any:
    cache = {"method": method, "budget": budget, "sinks": 4, "recent": 4, "merge_every": 4, **changes}
    return models.make_recipe(
        checkpoint, cache=cache, export={"logits": "all", "prefill_chunk": 32}, limits={"max_length": 160}
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_checkpoint(tmp_path_factory.mktemp("latent") / "checkpoint", CONFIGS["minicpm3"]())


@pytest.fixture(scope="module")
def merging(checkpoint: Path) -> Path:
    return build(recipe_of(checkpoint, 32, "keepkv", merge_every=1), checkpoint.parent / "merging")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_transformers_and_the_cache_is_one_head_of_latents(name: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    engine = load(build(recipe_of(checkpoint, 1.0, "full"), tmp_path / "artifact"))
    assert {(x.kv_heads, x.key_size, x.value_size) for x in engine.plan.caches} == {(1, RANK + ROTATED, RANK)}
    assert {x.slot_bytes() for x in engine.plan.caches} == {4 * (RANK + ROTATED)}, "a value is stored beside its key"
    models.assert_logits_of_transformers(engine, checkpoint)


def test_a_merged_lane_is_saved_and_restored_and_runs_from_functions(
    merging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ids,) = models.random_ids(1, 110)
    answers = []
    for operators in ("", "off"):
        monkeypatch.setenv(VARIABLE, operators) if operators else monkeypatch.delenv(VARIABLE, raising=False)
        engine = load(merging)
        lanes = engine.lanes(2)
        for first in (0, 32):
            lanes.append([ids[first : first + 32], ids[:0]], prefill=True)
        saved = lanes.save(0)
        assert {x.shape[-1] for name, x in saved.state.items() if name.endswith(".value")} == {0}
        lanes.append([ids[:20], models.random_ids(2, 20)[0]], prefill=True)  # both lanes read other tokens
        lanes.restore(1, saved)
        rows = [lanes.append([ids[:0], ids[i : i + 1]], prefill=False)[1, :1].copy() for i in range(64, 110)]
        whole = engine.lanes(1)
        for first in (0, 32):
            whole.append([ids[first : first + 32]], prefill=True)
        right = np.concatenate([whole.append([ids[i : i + 1]], prefill=False)[0, :1].copy() for i in range(64, 110)])
        assert np.abs(np.concatenate(rows) - right).max() <= 1e-5 * np.abs(right).max()
        answers.append(right)
    assert np.abs(answers[0] - answers[1]).max() <= 1e-4 * np.abs(answers[0]).max()


def test_requests_that_fork_and_sessions_of_a_merged_cache_are_answered_as_alone(merging: Path, tmp_path: Path) -> None:
    *engines, other = (load(merging, lanes=lanes) for lanes in (None, 2, None))
    alone = Alone(other)
    for seed in range(4):
        Schedule(engines, alone, tmp_path / str(seed), 400 + seed).run(15)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("cam", {}), ("keepkv", {"parameters": {"zip": "key"}}), ("keepkv", {"dtype": "int8"})],
    ids=["other weights", "scaled keys", "scales"],
)
def test_values_that_change_apart_from_keys_are_stored(checkpoint: Path, method: str, changes: Any) -> None:
    plan = read_model(recipe_of(checkpoint, 32, method, **changes)).plan
    assert {(x.value_in_key, x.shapes(1)["value"][-1]) for x in plan.caches} == {(False, RANK)}


def test_a_gpu_stores_values_and_refuses_an_artifact_without_them(checkpoint: Path, merging: Path) -> None:
    recipe = recipe_of(checkpoint, 32, "keepkv")
    backend = recipe.backend.model_copy(update={"device": "cuda"})
    assert not any(x.value_in_key for x in read_model(recipe.model_copy(update={"backend": backend})).plan.caches)
    for implementation in implementations(load_manifest(merging), "cuda").values():
        assert str(implementation) == (
            "function: values are a part of their keys, which no kernel for cuda reads: build for cuda"
        )


def test_layers_have_budgets_of_their_own(checkpoint: Path) -> None:
    recipe = recipe_of(checkpoint, 32, "keepkv").model_dump()
    recipe["cache"]["allocation"] = {"kind": "listed", "shares": [[1.0], [3.0]]}
    plan = read_model(type(recipe_of(checkpoint, 32, "keepkv")).model_validate(recipe)).plan
    assert [layer.budget for layer in plan.caches] == [(16,), (48,)]


def test_a_method_that_rotates_keys_is_refused(checkpoint: Path) -> None:
    method = next(name for name, kind in all_methods().items() if kind().rotary)
    with pytest.raises(UsageError, match="keys are latents"):
        read_model(recipe_of(checkpoint, 16, method))


def test_another_expansion_is_refused_by_name() -> None:
    class Doubled(torch.nn.Module):
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim = 4, 2, 3

        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = torch.nn.Linear(6, 2 * 7, bias=False)

        def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = self.kv_b_proj(latent).view(1, latent.shape[2], -1, 7).transpose(1, 2)
            return torch.cat([2 * rows[..., :4], rotated.expand(-1, 2, -1, -1)], -1), rows[..., 4:]

    class Model(torch.nn.Module):
        class config:
            model_type = "doubled"

    model = Model()
    model.attention = Doubled()
    with pytest.raises(UsageError, match=r"doubled has latent attention \('attention'\) that expands"):
        check_expansions(model)
