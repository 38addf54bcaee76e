"""Tests of every method through both operators: sequences far beyond the budget; shorter ones stay unchanged."""

from dataclasses import replace

import numpy as np
import pytest

from kvexport.methods import all_methods
from kvexport.ops.vote_attention import VoteAttentionAttributes
from tests.conformance.backends import Backend, Torch, reached
from tests.conformance.cases import MERGE_PROFILES, MergeProfile
from tests.conformance.comparison import STATE, assert_finite, by_position, in_order, state_of
from tests.conformance.oracle import vote_attention

Arrays = dict[str, np.ndarray]
every_profile = pytest.mark.parametrize("profile", MERGE_PROFILES, ids=lambda profile: profile.name)
every_kernel = pytest.mark.parametrize(
    ("backend", "profile"),
    [
        pytest.param(backend, profile, id=f"{profile.name}-{backend.name}")
        for backend in reached()
        for profile in MERGE_PROFILES
        if backend.lacks(profile.attributes(1)) is None
    ],
)
QUERY_HEADS, BATCH = 4, 2


def attention_of(profile: MergeProfile) -> VoteAttentionAttributes:
    method = profile.build_method()
    own = method if method.extra_state else None
    return VoteAttentionAttributes(1.0, method.vote_exponent, profile.statistics, profile.sliding_window, method=own)


def empty(profile: MergeProfile, capacity: int) -> Arrays:
    slots = (BATCH, profile.kv_heads, capacity)
    sizes = {"B": BATCH, "H": profile.kv_heads, "C": capacity, "D": profile.sizes[0], "Dv": profile.sizes[1]}
    own = {x.name: np.zeros(x.shape(sizes), x.dtype) for x in profile.build_method().extra_state}
    return own | {
        "key": np.zeros((*slots, profile.sizes[0]), profile.dtype),
        "value": np.zeros((*slots, profile.sizes[1]), profile.dtype),
        "votes": np.zeros(slots, np.float32),
        "score": np.zeros((BATCH, profile.kv_heads, len(profile.statistics), capacity), np.float32),
        "position": np.zeros(slots, np.int32),
    }


def new_tokens(
    profile: MergeProfile, rng: np.random.Generator, seen: int, tokens: int, peak: float, state: Arrays
) -> Arrays:
    """Return new tokens with keys around few centres, and queries whose logits reach `peak`."""
    key_size, value_size = profile.sizes
    centre = np.random.default_rng(0).normal(size=(4, key_size))
    key = centre[rng.integers(0, 4, (BATCH, profile.kv_heads, tokens))] + 0.3 * rng.normal(
        size=(BATCH, profile.kv_heads, tokens, key_size)
    )
    query = rng.normal(size=(BATCH, QUERY_HEADS, tokens, key_size))
    query *= peak / np.abs(query @ key.repeat(QUERY_HEADS // profile.kv_heads, 1).swapaxes(-1, -2)).max()
    inputs = {"query": query, "key": key, "value": rng.normal(size=(BATCH, profile.kv_heads, tokens, value_size))}
    inputs = {name: x.astype(profile.dtype) for name, x in inputs.items()}
    inputs["position"] = np.tile(seen + np.arange(tokens), (BATCH, 1))
    inputs["query_length"] = np.full((BATCH, 1), tokens)
    return inputs | {f"past_{name}": x for name, x in state.items()}


def assert_same_slots(actual: Arrays, expected: Arrays) -> None:
    """Assert that both caches have the same slots, bit by bit, in any rows."""
    for b, h in np.ndindex(*expected["votes"].shape[:2]):
        a, e = by_position(actual, b, h), by_position(expected, b, h)
        for name in STATE:
            assert a[name].tobytes() == e[name].tobytes(), f"{name} depends on the order of slots"


@every_kernel
def test_twenty_times_the_budget_stays_finite_and_bounded(backend: Backend, profile: MergeProfile) -> None:
    """A cache that merges over twenty times its budget stays finite, with bounded norms and votes.

    PyTorch computes the attention, the backend the merges. Logits reach 200 in every other call. The order of the slots
    does not change a merge.
    """
    budget, chunk, rng = 12, 8, np.random.default_rng(11)
    attention, attributes = attention_of(profile), profile.attributes(budget)
    capacity = 20 * budget if not attributes.method.compresses else budget + chunk
    state, seen, longest = empty(profile, capacity), 0, 0.0
    while seen < 20 * budget:
        inputs = new_tokens(profile, rng, seen, chunk, 200.0 if seen % (2 * chunk) else 3.0, state)
        longest = max(longest, float(np.linalg.norm(inputs["key"].astype(np.float64), axis=-1).max()))
        result = Torch().vote_attention(inputs, attention)
        assert_finite(result)
        state, seen = state_of(result), seen + chunk
        if attributes.method.compresses:
            before = state
            state = state_of(backend.merge_cache(before, attributes))
            if seen % (4 * chunk) == 0:
                assert_same_slots(state, state_of(backend.merge_cache(in_order(before), attributes)))
            assert_finite(state)
            assert ((state["votes"] > 0).sum(-1) == min(seen, budget)).all()
        norms = np.linalg.norm(state["key"].astype(np.float64), axis=-1)
        if profile.parameters.get("zip") != "key":
            assert norms.max() <= longest * 1.001
        assert (state["votes"].sum(-1) <= seen * (1 + 1e-5)).all()


@every_profile
def test_within_the_budget_attention_is_the_uncompressed_models(profile: MergeProfile) -> None:
    """The merge after each call changes nothing."""
    if profile.sliding_window:
        profile = replace(profile, sliding_window=0)
    length, rng = 20, np.random.default_rng(12)
    attributes, attention = profile.attributes(length), attention_of(profile)
    state, seen, keys, values = empty(profile, length + 4), 0, [], []
    while seen < length:
        inputs = new_tokens(profile, rng, seen, 4 if seen < 12 else 1, 5.0, state)
        result = Torch().vote_attention(inputs, attention)
        keys.append(inputs["key"].astype(np.float64))
        values.append(inputs["value"].astype(np.float64))
        group = QUERY_HEADS // profile.kv_heads
        key, value = (np.concatenate(x, axis=2).repeat(group, 1) for x in (keys, values))
        logits = inputs["query"].astype(np.float64) @ key.swapaxes(-1, -2)
        past = np.arange(key.shape[2]) <= inputs["position"][:, None, :, None]
        mass = np.where(past, np.exp(logits), 0.0)
        expected = mass @ value / mass.sum(-1, keepdims=True)
        np.testing.assert_allclose(
            result["output"], expected, rtol=1e-5, atol=2e-3 if profile.dtype == "float16" else 1e-5
        )
        before = state_of(result)
        state, seen = state_of(Torch().merge_cache(before, attributes)), seen + inputs["position"].shape[1]
        for name, x in before.items():
            used = x[:, :, :, :seen] if name == "score" else x[:, :, :seen]
            assert (used == (state[name][:, :, :, :seen] if name == "score" else state[name][:, :, :seen])).all(), name


@pytest.mark.parametrize("window", [0, 3, 16])
@pytest.mark.parametrize("recency_weight", [1.0, 1.2])
@pytest.mark.parametrize("logit", [-150.0, 0.0, 3.0, 150.0])
def test_a_constant_score_stays_unchanged_with_any_queries(window: int, recency_weight: float, logit: float) -> None:
    """The correction of a log_ema depends only on the slot's age."""
    from kvexport.methods.slots import Statistic

    profile = MergeProfile("constant", "keepkv", {"decay": 0.95})
    attention = VoteAttentionAttributes(1.0, 1.0, (Statistic("log_ema", 0.95, window, recency_weight),))
    state, seen, rng = empty(profile, 32), 0, np.random.default_rng(0)
    for tokens in (7, 1, 12, 5, 1, 1):
        inputs = new_tokens(profile, rng, seen, tokens, 1.0, state)
        inputs["key"][:] = np.eye(8, dtype=np.float32)[0]
        inputs["query"][:] = logit * np.eye(8, dtype=np.float32)[0]
        for attend in (Torch().vote_attention, vote_attention):
            result = attend(inputs, attention)
            age = seen + tokens - result["present_position"][:, :, : seen + tokens]
            corrected = result["present_score"][:, :, 0, : seen + tokens] - np.log1p(-(0.95**age))
            np.testing.assert_allclose(corrected, logit, rtol=2e-5, atol=2e-5)
        state, seen = state_of(Torch().vote_attention(inputs, attention)), seen + tokens


def test_every_method_has_a_profile() -> None:
    assert {profile.method for profile in MERGE_PROFILES} == set(all_methods())
