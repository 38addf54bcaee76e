"""Every kind of decoder passes `validate` with budgets that evict, and equals transformers' model before it evicts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf

from kvexport.export.build import build
from kvexport.export.hooks.llama4 import _Positions
from kvexport.validate.result import ValidationResult
from kvexport.validate.runner import validate_artifact
from tests.export.test_latent import CONFIGS as LATENT
from tests.export.test_latent import LATENT as LATENT_SIZES
from tests.export.test_own_attention import CONFIGS as OWN
from tests.export.test_shared_caches import CONFIGS as SHARED
from tests.export.test_text_parts import WRAPPERS
from tests.support import models
from tests.support.hybrids import CONFIGS as HYBRIDS

BUDGET, LENGTH = 12, 64
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "dense": models.llama,
    "experts": lambda: hf.Qwen3MoeConfig(**models.SIZES, head_dim=16, **EXPERTS),
    "text part of a vision model": WRAPPERS["qwen3_vl"],
    "attention in the model's own code": OWN["gpt_neo"],
    "ALiBi": OWN["bloom"],
    "latent attention": LATENT["minicpm3"],
    "convolution": HYBRIDS["lfm2"],
    "gated delta rule": HYBRIDS["qwen3_5_text"],
    "Kimi delta attention": lambda: hf.KimiLinearConfig(
        **LATENT_SIZES, **EXPERTS, layer_types=["linear_attention", "full_attention"], linear_num_heads=2,
        linear_head_dim=16, n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
    "Mamba-2, with layers that are experts or dense alone": lambda: hf.NemotronHConfig(
        **{name: size for name, size in models.SIZES.items() if name != "num_hidden_layers"}, head_dim=16,
        layers_block_type=["linear_attention", "full_attention", "moe", "mlp"], mamba_num_heads=4, mamba_head_dim=16,
        n_groups=2, ssm_state_size=16, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
    ),
    "Mamba": HYBRIDS["jamba"],
    "Mamba in several scans": HYBRIDS["zamba"],
    "RG-LRU": HYBRIDS["recurrent_gemma"],
    "attention module shared by layers": HYBRIDS["zamba2"],
    "layers that read another layer's cache": SHARED["gemma4_text"],
}  # fmt: skip


def validated(config: hf.PretrainedConfig, folder: Path, method: str) -> ValidationResult:
    checkpoint = folder / "checkpoint"
    if config.get_text_config() is config:
        models.save_checkpoint(checkpoint, config)
    else:
        torch.manual_seed(0)
        model = hf.AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.15)
        model.save_pretrained(checkpoint)
    cache = {"method": method, "budget": BUDGET, "sinks": 4, "recent": 4, "merge_every": 4}
    recipe = models.make_recipe(checkpoint, cache=cache, export={"prefill_chunk": 4}, limits={"max_length": LENGTH})
    return validate_artifact(build(recipe, folder / method), length=LENGTH, batch=2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_past_its_budget(kind: str, tmp_path: Path) -> None:
    for method in ("keepkv", "ballot"):
        result = validated(KINDS[kind](), tmp_path, method)
        assert result.passed, result.problems
        assert set(result.budgets) == {BUDGET} and result.head_merges > 10
        assert result.first_compared > 0


def test_wrong_positions_that_export_and_reference_share_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The layers scale their queries by their position.
    config = hf.Llama4TextConfig(
        **models.SIZES, head_dim=16, moe_layers=[], intermediate_size_mlp=32, no_rope_layers=[0, 0], floor_scale=2,
        attn_scale=0.5, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    monkeypatch.setattr(
        _Positions, "_keep", lambda self, _, args, named: setattr(self, "ids", 0 * named["position_ids"])
    )
    result = validated(config, tmp_path, "keepkv")
    assert result.own_kl < 1e-6 and result.mismatch is None
    assert "before anything was evicted the engine is" in result.problem
