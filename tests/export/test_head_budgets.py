"""Budgets of single KV heads: a cache of its own for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexport.artifact.reading import load_manifest
from kvexport.cache import plan_cache
from kvexport.export.build import build, read_model
from kvexport.export.graph.tracer import by_caches
from kvexport.methods.ballot import Ballot
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention
from kvexport.recipe.load import load_recipe
from kvexport.runtime.lanes import Lanes
from kvexport.validate.backend import ReferenceBackend
from kvexport.validate.reference import TorchReference
from kvexport.validate.runner import validate_artifact

SETTINGS = ["cache.budget=24", "export.prefill_chunk=16", "limits.max_length=128", "limits.max_batch=2"]
UNEQUAL = "[[0.6, 1.4], [1.2, 0.8]]"


def recipe_of(shares: str | None = None) -> Any:
    listed = [] if shares is None else ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"]
    return load_recipe("tiny-ballot", [*SETTINGS, *listed]).recipe


def test_every_head_attends_with_its_group_and_its_sink_logits() -> None:
    torch.manual_seed(0)
    batch, heads, group, tokens, size = 2, 3, 2, 5, 8
    query = torch.randn(batch, heads * group, tokens, size)
    key, value = (torch.randn(batch, heads, tokens, size) for _ in range(2))
    logits, position = torch.randn(heads * group), torch.arange(tokens).expand(batch, tokens)
    attributes = VoteAttentionAttributes(scale=0.3, vote_exponent=1.0, statistics=Ballot().statistics)

    def attend(cache: int, *given: Tensor | None) -> Tensor:
        query, key, value, logits = given
        held = key.shape[1]  # type: ignore[union-attr]
        past = [torch.zeros(batch, held, 16, size), torch.zeros(batch, held, 16, size), torch.zeros(batch, held, 16)]
        past += [torch.zeros(batch, held, 2, 16), torch.zeros(batch, held, 16, dtype=torch.int32)]
        asked: Any = (query, key, value, position, torch.full((batch, 1), tokens), *past, logits)
        return vote_attention(*asked, attributes=attributes)[0]

    together = by_caches(range(1), attend, query, key, value, logits)
    apart = by_caches(range(4, 7), attend, query, key, value, logits)
    torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-6)


def test_equal_shares_of_heads_give_what_layers_with_that_budget_give() -> None:
    rng = np.random.default_rng(3)
    tokens = [rng.integers(3, 300, size=n) for n in (70, 61)]
    recipe = recipe_of()
    shape = read_model(recipe)
    reference = TorchReference(shape.checkpoint, shape.plan, shape.geometry, recipe.cache.build_method(), recipe)
    found = []
    for shares in (None, "[[1, 1], [1, 1]]"):
        reference.plan = plan_cache(recipe_of(shares), shape.geometry)
        backend = ReferenceBackend(reference, reference.plan, 2)
        lanes = Lanes(backend, reference.plan, 2, prefill_chunk=16, merge_every=8)
        found.append([lanes.append([t[i : i + 16] for t in tokens], prefill=True) for i in range(0, 64, 16)])
    assert [len(plan_cache(recipe_of(s), shape.geometry).layers) for s in (None, "[[1, 1], [1, 1]]")] == [2, 4]
    for together, apart in zip(*found, strict=True):
        np.testing.assert_allclose(apart, together, rtol=1e-4, atol=1e-4)


def test_an_engine_whose_heads_have_budgets_of_their_own_is_pytorchs(tmp_path: Path) -> None:
    path = build(recipe_of(UNEQUAL), tmp_path / "heads", name="heads")
    manifest = load_manifest(path)
    assert (manifest.model.layers, manifest.model.query_heads) == (2, (2, 2, 2, 2))
    assert [layer.budget for layer in manifest.cache.layers] == [14, 34, 29, 19]
    result = validate_artifact(path, length=48)
    assert result.passed and result.in_place_identical and result.head_merges > 10
