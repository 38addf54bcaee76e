"""Decoders with latent attention: the cache has one KV head of latents, and the logits equal Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV32Config, MiniCPM3Config

from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.hooks.latent import check_expansions
from kvexport.methods import all_methods
from tests.support import models

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


def recipe_of(checkpoint: Path, budget: float | int, method: str) -> Any:
    cache = {"method": method, "budget": budget, "sinks": 4, "recent": 4, "merge_every": 4}
    return models.make_recipe(
        checkpoint, cache=cache, export={"logits": "all", "prefill_chunk": 32}, limits={"max_length": 160}
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_transformers_and_the_cache_is_one_head_of_latents(name: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    engine = load(build(recipe_of(checkpoint, 1.0, "full"), tmp_path / "artifact"))
    assert {(x.kv_heads, x.key_size, x.value_size) for x in engine.plan.caches} == {(1, RANK + ROTATED, RANK)}
    ids = models.random_ids(0, 90, 60)
    right = models.hugging_face_logits(checkpoint, ids)
    for actual, logits in zip(models.given_tokens_logits(engine, ids, (50, 20)), right, strict=True):
        assert np.abs(actual - logits).max() <= 1e-5 * np.abs(logits).max()


def test_layers_have_budgets_of_their_own(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["minicpm3"]())
    recipe = recipe_of(checkpoint, 32, "keepkv").model_dump()
    recipe["cache"]["allocation"] = {"kind": "listed", "shares": [1.0, 3.0]}
    plan = read_model(type(recipe_of(checkpoint, 32, "keepkv")).model_validate(recipe)).plan
    assert [layer.budget for layer in plan.caches] == [16, 48]


def test_a_method_that_rotates_keys_is_refused(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["minicpm3"]())
    method = next(name for name, kind in all_methods().items() if kind().rotary)
    with pytest.raises(UsageError, match="keys are latents"):
        read_model(recipe_of(checkpoint, 16, method))


def test_an_indexer_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", DeepseekV32Config(**LATENT, **EXPERTS))
    with pytest.raises(UsageError, match="picks the tokens that a query sees with an indexer"):
        read_model(recipe_of(checkpoint, 16, "keepkv"))


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
