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
from tests.support.one_head import DECAY, appended, attended, cache_of, merged, random_cache, score_for, tensors_of

theorem = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


# Key factors


@theorem
@given(seeds, st.integers(1, 9))
def test_keepkv_key_factors_do_not_change_the_attention_of_the_current_query(seed: int, leaving: int) -> None:
    # Logits are around 8: Eq. 7 is ill-conditioned near its pole, where float32 cannot satisfy the theorem.
    cache, query = random_cache(seed, shift=8.0)
    method = KeepKV(decay=DECAY, threshold=-1.0, zip="key", key_factor_max=math.inf, order="evict-first")
    after = merged(cache, method, len(cache["key"]) - leaving, sinks=1, recent=2)
    np.testing.assert_allclose(after["votes"].sum(), cache["votes"].sum(), rtol=1e-5)
    np.testing.assert_allclose(attended(after, query), attended(cache, query), rtol=5e-5, atol=5e-5)


FACTORS = [((1, -3), 0.350198), ((-1, -3), 1.264706), ((0.2, -2), 19.950766), ((0.3, -2), -3.291429)]


def log_mean_and_mean_logit(logits: tuple[float, ...]) -> tuple[float, float]:
    weight = np.exp(logits)
    return math.log(weight.mean()), float(weight @ logits / weight.sum())


@pytest.mark.parametrize(("logits", "factor"), FACTORS)
def test_key_factor_through_the_operator(logits: tuple[float, float], factor: float) -> None:
    # Keys along the query (1, 0) have different logits. The second coordinate keeps their cosine positive.
    key = [(logits[0], 5.0), (logits[1], 5.0)]
    cache = cache_of(key, score=score_for(logits, [0, 1]))
    after = merged(cache, KeepKV(decay=DECAY, threshold=0.0, zip="key", key_factor_max=math.inf), 1)
    weight = np.exp(logits)
    mean_key = weight @ key / weight.sum()
    if factor > 0:
        # float32 near the pole: an error of 1e-7 in a mean logit of 0.05.
        np.testing.assert_allclose(after["key"][0], factor * mean_key, rtol=1e-4)
        assert after["votes"][0] == pytest.approx(2.0)
    else:
        log_mean, mean_logit = log_mean_and_mean_logit(logits)
        np.testing.assert_allclose(after["key"][0], mean_key, rtol=1e-5)
        assert after["votes"][0] == pytest.approx(2.0 * math.exp(log_mean - mean_logit), rel=1e-5)


def test_a_key_factor_outside_the_limit_falls_back_to_fractional_votes() -> None:
    logits = (1.0, -3.0)  # factor 0.350198 is outside [1/2, 2] and inside [1/3, 3]
    cache = cache_of([(1.0, 5.0), (-3.0, 5.0)], score=score_for(logits, [0, 1]))
    within = merged(cache, KeepKV(decay=DECAY, threshold=0.0, zip="key", key_factor_max=3.0), 1)
    outside = merged(cache, KeepKV(decay=DECAY, threshold=0.0, zip="key", key_factor_max=2.0), 1)
    by_votes = merged(cache, KeepKV(decay=DECAY, threshold=0.0, zip="vote"), 1)
    assert within["votes"][0] == pytest.approx(2.0)
    for name in by_votes:
        np.testing.assert_array_equal(outside[name], by_votes[name])
    assert outside["votes"][0] < 1.5


def test_the_pole_of_the_key_factor_falls_back_to_votes_without_a_limit() -> None:
    # Equal weights and opposite logits make L = 0 exactly; positions far back make the bias correction 1 exactly.
    light = float(torch.exp(torch.tensor(-2.0)))
    cache = cache_of(
        [[1.0, 5.0], [-1.0, 5.0], [0.0, -1.0]], votes=[light, 1.0, 1.0], score=[1.0, -1.0, 0.0], position=[0, 1, 5000]
    )
    after = merged(cache, KeepKV(decay=DECAY, threshold=0.0, zip="key", key_factor_max=math.inf), 2, recent=1)
    np.testing.assert_allclose(after["key"][0], [0.0, 5.0], atol=1e-6)
    assert after["votes"][0] == pytest.approx(2 * light * math.e, rel=1e-5)  # sum p s


# Attention sag


def test_attention_of_a_merged_equal_pair() -> None:
    key, query = [[1.0, 0.5], [1.0, 0.5], [-0.3, 0.2], [0.4, -1.0]], np.array([0.7, 0.4])
    s = np.exp(np.asarray(key) @ query)
    cache = cache_of(key, score=score_for(np.asarray(key) @ query, np.arange(4)))
    after = merged(cache, KeepKV(decay=DECAY, threshold=0.9999, zip="mean", order="merge-first"), 3)
    assert after["votes"].tolist() == [2.0, 1.0, 1.0]
    statistic = (Statistic("probability"),)
    # A new token with a logit far below the others has no effect.
    for alpha, expected in ((0.0, s[0] / (s.sum() - s[0])), (1.0, 2 * s[0] / s.sum())):
        after["score"][:] = 0.0
        _, present = appended(after, [query], [[-50.0, -50.0]], [[0.0, 0.0]], statistic, alpha=alpha)
        assert present["score"][0] == pytest.approx(expected, rel=1e-5)


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


# Conservation


@theorem
@given(seeds, st.integers(5, 13), st.sampled_from(["evict-first", "merge-first"]))
def test_votes_and_dropped_tokens_add_up_to_the_tokens_seen(seed: int, budget: int, order: Any) -> None:
    # Keys form three bundles far apart, with a threshold between: only a bundle without a target loses tokens.
    rng = np.random.default_rng(seed)
    bundle = rng.integers(0, 3, 14)
    key = 10 * np.eye(3)[bundle] + rng.normal(size=(14, 3)) * 0.1
    votes = rng.integers(1, 5, 14).astype(float)
    cache = cache_of(key, None, votes, rng.permutation(np.linspace(-3, 3, 14)))
    after = merged(cache, KeepKV(decay=DECAY, threshold=0.5, zip="mean", order=order), budget, sinks=2, recent=2)
    assert len(after["key"]) == budget
    protected = [0, 1, 12, 13]
    free_after = ~np.isin(after["position"], protected)
    lost = 0.0
    for b in range(3):
        before = votes[[i for i in range(14) if bundle[i] == b and i not in protected]].sum()
        kept = after["votes"][free_after & (after["key"].argmax(-1) == b)].sum()
        assert kept in (0.0, pytest.approx(before)), "part of a bundle was lost"
        lost += before - kept
    assert after["votes"].sum() + lost == pytest.approx(votes.sum())


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
    key, value, votes, score, position = tensors_of(random_cache(1)[0])
    with pytest.raises(UsageError, match="the score has 2 statistics, but keepkv keeps 1"):
        merge_cache(key, value, votes, score.repeat(1, 1, 2, 1), position, attributes=MergeCacheAttributes(KeepKV(), 6))


def test_full_keeps_everything() -> None:
    cache, _ = random_cache(1)
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
