"""The plan counts LoRA adapters of the projections that a build gives adapters, and of no others."""

from pathlib import Path
from typing import Any

import pytest

from kvexport.artifact.reading import load_manifest
from kvexport.backends.adapters import largest_bytes
from kvexport.export.build import build, plan_memory
from tests.export import test_latent
from tests.support import hybrids, models

CONFIGS: dict[str, Any] = {
    "qwen3_next": hybrids.CONFIGS["qwen3_next"],  # shared experts and their gate read all tokens as rows of one matrix
    "granitemoehybrid": hybrids.CONFIGS["granitemoehybrid"],  # so does a router that is a Linear
    "deepseek_v3": test_latent.CONFIGS["deepseek_v3"],  # the graph multiplies with the weight of one Linear otherwise
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_counts_the_adapters_that_a_build_puts_in(name: str, tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS[name]())
    recipe = models.make_recipe(checkpoint, limits={"max_length": 64})
    recipe = recipe.model_copy(update={"adapters": recipe.adapters.model_copy(update={"count": 1, "rank": 2})})
    targets = load_manifest(build(recipe, tmp_path / "artifact")).adapters
    assert plan_memory(recipe).adapter_bytes == largest_bytes(recipe, targets)
