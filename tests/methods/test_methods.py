"""Closed forms and rules of the methods full, streaming, h2o and keepkv, through the two operators in PyTorch.

Expected values come from the formulas, in float64. The operators compute in float32, so equality means 1e-5 of the
magnitude. tests/conformance/test_theorems.py tests the theorems of all methods on every backend.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexport.errors import UsageError
from kvexport.methods.base import Method
from kvexport.methods.full import Full
from kvexport.methods.h2o import H2O
from kvexport.methods.keepkv import KeepKV
from kvexport.methods.slots import Statistic
from kvexport.methods.streaming import Streaming
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from tests.support.one_head import DECAY, appended, cache_of, merged, random_cache, score_for, tensors_of

theorem = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


# Key factors


def test_the_pole_of_the_key_factor_falls_back_to_votes_without_a_limit() -> None:
    # Equal weights and opposite logits make L = 0 exactly; positions far back make the bias correction 1 exactly.
    light = float(torch.exp(torch.tensor(-2.0)))
    cache = cache_of(
        [[1.0, 5.0], [-1.0, 5.0], [0.0, -1.0]], votes=[light, 1.0, 1.0], score=[1.0, -1.0, 0.0], position=[0, 1, 5000]
    )
    after = merged(cache, KeepKV(decay=DECAY, threshold=0.0, zip="key", key_factor_max=math.inf), 2, recent=1)
    np.testing.assert_allclose(after["key"][0], [0.0, 5.0], atol=1e-6)
    assert after["votes"][0] == pytest.approx(2 * light * math.e, rel=1e-5)  # sum p s


# The exponential moving average


@theorem
@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=5), st.floats(0.5, 0.99))
def test_the_log_domain_average_is_the_linear_one(seed: int, chunks: list[int], decay: float) -> None:
    rng = np.random.default_rng(seed)
    count = sum(chunks)
    key, query = rng.normal(size=(count, 4)), rng.normal(size=(count, 4))
    linear = np.zeros(count)
    for t in range(count):
        linear[: t + 1] = decay * linear[: t + 1] + (1 - decay) * np.exp(key[: t + 1] @ query[t])
    cache, start = cache_of(np.zeros((0, 4))), 0
    for tokens in chunks:
        rows = slice(start, start + tokens)
        _, cache = appended(cache, query[rows], key[rows], key[rows], (Statistic("log_ema", decay),))
        start += tokens
    np.testing.assert_allclose(cache["score"], np.log(linear), rtol=1e-5, atol=1e-5)


@theorem
@given(seeds, st.sampled_from(["key", "vote", "mean"]))
def test_merging_before_an_update_equals_averaging_after_it(seed: int, mode: Any) -> None:
    # Slots of one key see the same scores from now on, so the vote-weighted mean commutes with the update.
    rng = np.random.default_rng(seed)
    key = np.tile(rng.normal(size=4), (5, 1))
    votes = rng.integers(1, 6, 5).astype(float)
    cache = cache_of(key, rng.normal(size=(5, 4)), votes, rng.normal(size=5))
    statistic, query, new = (Statistic("log_ema", DECAY),), rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    merged_first = merged(cache, KeepKV(decay=DECAY, threshold=0.99, zip="mean"), 1)
    _, one = appended(merged_first, query, new, new, statistic)
    _, other = appended(cache, query, new, new, statistic)
    mean = np.log(votes @ np.exp(other["score"][:5]) / votes.sum())
    assert one["score"][0] == pytest.approx(mean, abs=1e-5)
    # The score of the merged slot does not depend on how the slot is stored.
    assert merged(cache, KeepKV(decay=DECAY, threshold=0.99, zip=mode), 1)["score"] == pytest.approx(
        merged_first["score"], abs=1e-6
    )


@pytest.mark.parametrize(
    "method", [Full(), Streaming(), H2O(), KeepKV(), KeepKV(order="evict-first", zip="key")], ids=lambda m: m.name
)
def test_an_empty_sequence_stays_empty(method: Method) -> None:
    zeros = cache_of(np.zeros((9, 3)), votes=np.zeros(9), position=np.zeros(9, int))
    out = merge_cache(*tensors_of(zeros), attributes=MergeCacheAttributes(method, 6, 1, 2))
    assert all((x == 0).all() for x in out)
    ones = np.ones((2, 3))
    output, present = appended(cache_of(np.zeros((0, 3))), ones, ones, ones, method.statistics, query_length=0)
    assert (output == 0).all()
    assert len(present["key"]) == 0


def test_a_score_of_other_statistics_than_the_method_keeps_is_refused() -> None:
    key, value, votes, score, position = tensors_of(random_cache(1))
    with pytest.raises(UsageError, match="the score has 2 statistics, but keepkv keeps 1"):
        merge_cache(key, value, votes, score.repeat(1, 1, 2, 1), position, attributes=MergeCacheAttributes(KeepKV(), 6))


def test_full_keeps_everything() -> None:
    cache = random_cache(1)
    after = merged(cache, Full(), len(cache["key"]))
    for name in cache:
        np.testing.assert_allclose(after[name], cache[name], rtol=1e-6)


# The methods' basic rules


def test_streaming_keeps_the_sinks_and_the_latest() -> None:
    cache = cache_of(np.ones((12, 2)), position=np.random.default_rng(0).permutation(12))
    assert merged(cache, Streaming(), 7, sinks=2, recent=1)["position"].tolist() == [0, 1, 7, 8, 9, 10, 11]


def test_h2o_keeps_the_heavy_hitters() -> None:
    cache = cache_of(np.ones((8, 2)), score=[0.0, 5.0, 1.0, 4.0, 3.0, 2.0, 0.0, 0.0])
    assert merged(cache, H2O(), 5, sinks=1, recent=1)["position"].tolist() == [0, 1, 3, 4, 7]


@pytest.mark.parametrize("shuffle", range(4))
@pytest.mark.parametrize(
    "method", [H2O(), KeepKV(order="evict-first"), KeepKV(order="merge-first")], ids=lambda m: m.model_dump_json()
)
def test_equal_scores_leave_by_the_lowest_position(method: Method, shuffle: int) -> None:
    order = np.random.default_rng(shuffle).permutation(10)
    # The keys are orthogonal, so nothing merges. Corrected scores are equal bit by bit at decay^seen = 0 in float32.
    position = np.r_[np.arange(9), 5000][order]
    cache = cache_of(np.eye(10)[order], score=np.full(10, 0.5), position=position)
    assert merged(cache, method, 6, sinks=1, recent=1)["position"].tolist() == [0, 5, 6, 7, 8, 5000]


@pytest.mark.parametrize("shuffle", range(4))
def test_equally_similar_targets_receive_by_the_lowest_position(shuffle: int) -> None:
    order = np.random.default_rng(shuffle).permutation(4)
    key = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])[order]
    score = np.array([9.0, 0.0, 8.0, 7.0])[order]
    cache = cache_of(key, score=score, position=np.array([1000, 1001, 1002, 1003])[order])
    after = merged(cache, KeepKV(zip="mean", order="evict-first"), 3)
    assert dict(zip(after["position"].tolist(), after["votes"].tolist(), strict=True)) == {
        1000: 1.0,
        1002: 2.0,
        1003: 1.0,
    }


@pytest.mark.parametrize("order", ["evict-first", "merge-first"])
@pytest.mark.parametrize(("threshold", "merges"), [(0.5, False), (0.49999, True), (0.50001, False)])
def test_a_pair_merges_only_above_the_threshold(order: Any, threshold: float, merges: bool) -> None:
    # Norms of 2 and a cosine of 1/2 are exact in binary.
    cache = cache_of([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -1.0]], score=[0.0, 1.0], position=[0, 1])
    after = merged(cache, KeepKV(threshold=threshold, zip="mean", order=order), 1)
    assert after["votes"].tolist() == [2.0 if merges else 1.0]


def test_merge_first_lets_similar_slots_leave_before_lonely_ones_of_lower_score() -> None:
    cache = cache_of(
        [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]], score=score_for([-5.0, 0.0, 1.0, 2.0], np.arange(4))
    )
    first = merged(cache, KeepKV(decay=DECAY, zip="mean", order="merge-first"), 3)
    assert (first["position"].tolist(), first["votes"].tolist()) == ([0, 2, 3], [1.0, 2.0, 1.0])
    evicted = merged(cache, KeepKV(decay=DECAY, zip="mean", order="evict-first"), 3)
    assert (evicted["position"].tolist(), evicted["votes"].tolist()) == ([1, 2, 3], [1.0, 1.0, 1.0])


def test_merge_first_looks_no_further_than_its_pool() -> None:
    # One slot must leave. The pair that could merge has the third- and fourth-lowest scores.
    key = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    cache = cache_of(key, score=score_for([-5.0, -4.0, 1.0, 2.0], np.arange(4)))
    far, near = (merged(cache, KeepKV(decay=DECAY, zip="mean", order="merge-first", pool=pool), 3) for pool in (3, 2))
    assert (far["position"].tolist(), far["votes"].tolist()) == ([0, 1, 3], [1.0, 1.0, 2.0])
    assert near["position"].tolist() == [1, 2, 3]
