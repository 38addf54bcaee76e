"""Tests of perturbation telemetry: its attention is the operator's, and lossless merges show no perturbation.

All observed perturbations are within Theorem 5's bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvexport.export.build import read_model
from kvexport.export.graph.graphs import merge_attributes
from kvexport.methods import all_methods
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import merge_cache
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention
from kvexport.plan.cache import CachePlan, LayerCache, LayerGeometry
from kvexport.report.page import render_html
from kvexport.report.text import render_text
from kvexport.schema.state import STATE_NAMES as STATE
from kvexport.validate.perturbation import Bound, Perturbation, layer_sections, theorem_5
from kvexport.validate.reference import TorchReference
from kvexport.validate.telemetry import Cache, Query, Telemetry, attend
from kvexport.validate.watch import watch
from tests.conformance.layout import flattened
from tests.support.models import llama, make_recipe, random_ids, save_checkpoint


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, because with tensors this small threads take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


NOW = {"decay": 1e-12}  # an average of the current query alone, so that its scores are exact


@pytest.mark.parametrize("window", [0, 9])
def test_attention_is_the_operators(window: int) -> None:
    torch.manual_seed(0)
    heads, group, slots, used, size, now = 2, 3, 14, 11, 8, 40
    attributes = VoteAttentionAttributes(size**-0.5, 0.6, (Statistic("probability"),), window, softcap=3.0)
    place = torch.stack([torch.randperm(now)[:slots] for _ in range(heads)]).int()
    votes = torch.where(torch.arange(slots) < used, torch.rand(1, heads, slots) + 0.5, 0.0)
    past = (
        torch.randn(1, heads, slots, size),
        torch.randn(1, heads, slots, 5),
        votes,
        torch.zeros(1, heads, 1, slots),
        place[None],
    )
    query, key, value = (torch.randn(1, n, 1, d) for n, d in ((heads * group, size), (heads, size), (heads, 5)))
    sinks = torch.randn(heads * group)
    output, *present = vote_attention(
        query, key, value, torch.tensor([[now]]), torch.tensor([[1]]), *past, sinks, attributes=attributes
    )
    cache = Cache(*(x[0].double() for x in present[:3]), present[4][0].long())
    actual = attend(Query(query[0, :, 0].double(), now, sinks.double()), cache, attributes)
    torch.testing.assert_close(actual.output.reshape(heads * group, 5).float(), output[0, :, 0], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Perturbation]]:
    """A function that observes three sequences of a random model, far beyond a budget of 24 slots.

    The model has one query head per KV head.
    """
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("one") / "checkpoint", llama(num_key_value_heads=4))

    def run(method: str, parameters: dict[str, Any] | None = None, **cache: Any) -> list[Perturbation]:
        cache = {"method": method, "parameters": parameters or {}, "budget": 24, "merge_every": 4, **cache}
        recipe = make_recipe(checkpoint, cache=cache, export={"prefill_chunk": 12}, limits={"max_length": 256})
        shape = read_model(recipe)
        assert shape.checkpoint is not None
        reference = TorchReference(shape.checkpoint, shape.plan, shape.geometry, recipe.cache.build_method(), recipe)
        return watch(reference, recipe, random_ids(0, 96, 70, 51))

    return run


def at(rows: list[Perturbation], query: str) -> list[Perturbation]:
    return [row for row in rows if row.query == query]


def test_a_lossless_merge_changes_the_next_query_alone(watched: Callable[..., list[Perturbation]]) -> None:
    rows = watched("keepkv", {"zip": "vote", "threshold": -1.0, **NOW})
    assert max(row.largest for row in at(rows, "current")) < 1e-5
    assert all(row.by_slot is not None and row.by_slot < 1e-4 for row in at(rows, "current"))
    assert all(row.theorem is not None and row.theorem.below_one == row.heads for row in at(rows, "current"))
    assert (
        max(row.theorem.median for row in at(rows, "current") if row.theorem and row.theorem.median is not None) < 1e-3
    )
    assert min(row.mean for row in at(rows, "next")) > 1e-4
    assert {row.step for row in at(rows, "next")} >= set(range(8))


@pytest.mark.parametrize("method", ["d2o", "streaming"])
def test_a_convex_merge_and_an_eviction_do_change_it(watched: Callable[..., list[Perturbation]], method: str) -> None:
    rows = watched(method)
    assert min(row.mean for row in at(rows, "current")) > 1e-3
    assert all(row.theorem is None and row.by_slot is None for row in rows)
    assert "Theorem 5" not in render_text(layer_sections(rows))


def test_the_first_merge_leads_away_from_the_full_cache(watched: Callable[..., list[Perturbation]]) -> None:
    """The first merge leads away from the full cache, and the loss remains."""
    rows = watched("streaming")
    for row in at(rows, "current"):
        if row.step == 0:
            assert row.to_full == pytest.approx(row.mean, rel=1e-6)
    assert np.mean([row.to_full for row in rows]) > np.mean([row.mean for row in rows])


def test_a_cache_within_its_budget_has_none(watched: Callable[..., list[Perturbation]]) -> None:
    assert watched("h2o", budget=200) == []
    assert "no entry had to be evicted" in render_text(layer_sections([]))


# Theorem 5

SIZE, SLOTS, BUDGET = 8, 20, 13


def one_merge(
    seed: int, method: str, parameters: dict[str, Any], *, error: float = 0.0, shift: float = 0.0, loud: float = 0.0
) -> tuple[Perturbation, Perturbation]:
    """Merge the random cache of one head, and return the perturbation for two queries.

    The scores are the logits of the first query, each with an error of up to `error`, and all of them too large by
    `shift`. The second query is near the first and has its own token, whose key contains the query `loud` times.
    """
    method_object = all_methods()[method](**parameters)
    layer = LayerCache(SIZE, SIZE, len(method_object.statistics), (BUDGET,), (SLOTS,), 2, (3,), 0, True, "float32")
    telemetry = Telemetry(CachePlan((layer,)), [LayerGeometry(1, 1, SIZE, SIZE)], method_object)
    rng = np.random.default_rng(seed)
    query = rng.normal(size=SIZE) / SIZE**0.5
    key, value = 2.0 + 0.3 * rng.normal(size=(SLOTS + 1, SIZE)), 0.1 * rng.normal(size=(SLOTS + 1, SIZE))
    key[SLOTS] += loud * query
    logit = key[:SLOTS] @ query + np.log1p(error * rng.uniform(-1.0, 1.0, SLOTS)) + shift
    score = [
        np.log1p(-(s.decay ** np.arange(SLOTS, 0, -1))) + logit if s.kind == "log_ema" else rng.random(SLOTS)
        for s in method_object.statistics
    ]
    votes = np.exp(0.5 * rng.normal(size=SLOTS))
    arrays = (key[:SLOTS], value[:SLOTS], votes, np.stack(score), np.arange(SLOTS, dtype=np.int32))
    state = [torch.from_numpy(x if x.dtype == np.int32 else x.astype(np.float32))[None, None] for x in arrays]
    state[3] = state[3][:, 0, None]
    assert state[3].shape == (1, 1, len(score), SLOTS)
    after = merge_cache(*state, attributes=merge_attributes(layer, method_object)[0])

    def see(start: int, stop: int, vector: np.ndarray) -> None:
        tokens = (torch.from_numpy(x[start:stop].astype(np.float32))[None, None] for x in (key, value))
        queries = torch.from_numpy(vector.astype(np.float32)).expand(1, 1, stop - start, SIZE)
        telemetry.attended(0, queries, *tokens, torch.arange(start, stop)[None], torch.tensor([[stop - start]]), None)

    see(0, SLOTS, query)
    names = [f"0.{kind}" for kind in STATE]
    telemetry.merged(
        0,
        {f"past_key_values.{n}": flattened(n[2:], x.numpy()) for n, x in zip(names, state, strict=True)},
        {f"present.{n}": flattened(n[2:], x.numpy()) for n, x in zip(names, after, strict=True)},
    )
    see(SLOTS, SLOTS + 1, query + 0.05 * rng.normal(size=SIZE))
    current, following = telemetry.rows()
    assert (current.query, following.query) == ("current", "next")
    return current, following


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("keepkv", {"threshold": -1.0}),
        ("keepkv", {"threshold": 0.985}),  # some merge, some are dropped
        ("keepkv", {"threshold": 0.985, "zip": "mean"}),
        ("keepkv", {"zip": "key", "order": "evict-first", "selector": "h2o"}),
        ("ballot", {}),
        ("ballot", {"zip": "vote"}),
    ],
)
def test_observed_perturbations_are_within_the_bound(method: str, parameters: dict[str, Any]) -> None:
    bounded = 0
    for seed in range(30):
        for row in one_merge(seed, method, parameters, error=0.01 * seed):
            assert row.heads == 1
            assert row.theorem is not None
            assert row.by_slot is not None
            assert row.mean <= row.by_slot + 2e-6
            if row.theorem.median is not None:
                assert row.theorem.observed == row.mean
                assert row.by_slot <= row.theorem.median + 1e-12
                bounded += 1
    assert bounded > 40


def test_scores_without_error_have_a_bound_of_nothing() -> None:
    for seed in range(5):
        current, _ = one_merge(seed, "keepkv", {"threshold": -1.0})
        assert current.theorem is not None
        assert current.theorem.median is not None
        assert current.mean < 1e-5
        assert current.theorem.median < 1e-4


def test_estimates_wrong_by_their_own_size_have_no_bound() -> None:
    rows = list(one_merge(1, "keepkv", {}, shift=-1.0))
    assert [row.theorem for row in rows] == [Bound(0, 0, None, None)] * 2
    assert re.search(r"all .*100\.0% +0\.0%", render_text(layer_sections(rows)))
    assert "Theorem 5 where it has a bound" in render_html("", "", layer_sections(rows))


def test_the_next_query_sees_its_own_token() -> None:
    for seed in range(5):
        _, quiet = one_merge(seed, "h2o", {})
        _, loud = one_merge(seed, "h2o", {}, loud=100.0)
        assert loud.mean < 1e-3 * quiet.mean
        assert loud.to_full < 1e-3 * quiet.to_full


def test_the_bound_is_the_papers() -> None:
    np.testing.assert_allclose(theorem_5(np.array([0.0, 0.5, 0.9]), 3.0), [0.0, 18.0, 1026.0], rtol=1e-12)
