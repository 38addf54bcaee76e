"""Values that are the first numbers of their keys, as latents are, and are not stored a second time.

The oracle stores them: its cache has the same numbers as values. An operator without stored values has to give the same
output and the same keys, votes, scores and positions.
"""

from dataclasses import replace

import numpy as np
import pytest

from kvexport.errors import UsageError
from kvexport.methods.slots import Statistic
from kvexport.ops.vote_attention import VoteAttentionAttributes
from tests.conformance import cases, oracle
from tests.conformance.backends import Backend, CudaBindingOnHost, Torch, reached
from tests.conformance.cases import (
    LOG_EMA,
    MERGE_SCENARIOS,
    SCENARIOS,
    MergeProfile,
    MergeScenario,
    Profile,
    Scenario,
    merge_cache_state,
    single_precision,
    stored_precision,
    vote_attention_inputs,
)
from tests.conformance.comparison import assert_near, assert_same_cache, assert_same_rows, by_position, state_of

Arrays = dict[str, np.ndarray]
every_backend = pytest.mark.parametrize(
    "backend", [x for x in reached() if x.name in ("torch", "onnx-function", "native-cpu")], ids=lambda x: x.name
)
SCORED = VoteAttentionAttributes(8**-0.5, 1.0, (LOG_EMA, Statistic("probability", 0.98)), softcap=20.0, value_prefix=12)
PROFILES = [
    Profile("scored-group8", SCORED, (8, 1), (20, 12)),
    # The same size, and the path of kernels for few tokens without scores.
    Profile(
        "unscored-half-group2",
        VoteAttentionAttributes(8**-0.5, 0.5, (Statistic(),), sliding_window=7, value_prefix=24),
        (4, 2),
        (24, 24),
        "float16",
    ),
]
MERGE_PROFILES = [
    MergeProfile("keepkv", "keepkv", {"zip": "vote"}, sizes=(20, 12)),
    MergeProfile("ballot-half", "ballot", sizes=(8, 8), dtype="float16"),  # its order reads the values
    MergeProfile("zeromerge", "zeromerge", {"residual": 0.5}, sizes=(12, 4)),
    MergeProfile("h2o", "h2o", sizes=(16, 8), sliding_window=14),
]


def attention_inputs(profile: Profile, scenario: Scenario) -> tuple[Arrays, Arrays]:
    """Return inputs without stored values, and the same inputs with them."""
    inputs, size = vote_attention_inputs(profile, scenario), profile.sizes[1]
    inputs["value"] = np.ascontiguousarray(inputs["key"][..., :size])
    stored = inputs | {"past_value": np.ascontiguousarray(inputs["past_key"][..., :size])}
    return inputs | {"past_value": stored["past_value"][..., :0]}, stored


def with_values(state: Arrays, size: int) -> Arrays:
    """Return a cache's tensors with stored values, which a cache without them may not have."""
    assert state["value"].shape == (*state["key"].shape[:-1], 0)
    return state | {"value": np.ascontiguousarray(state["key"][..., :size])}


@every_backend
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_attention_equals_that_over_stored_values(backend: Backend, profile: Profile, scenario: Scenario) -> None:
    inputs, stored = attention_inputs(profile, scenario)
    actual = backend.vote_attention(inputs, profile.attributes)
    expected = oracle.vote_attention(stored, profile.attributes)
    single, rounded = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
    assert_near(actual["output"], expected["output"], rounded, "output")
    for b, (used, length) in enumerate(scenario.lanes):
        lane = slice(b, b + 1)
        own, right = ({n: x[lane, ..., : used + length, :] if n in ("key", "value") else x[lane, ..., : used + length]
                       for n, x in state_of(each).items()} for each in (actual, expected))  # fmt: skip
        statistics = profile.attributes.statistics
        assert_same_cache(with_values(own, profile.sizes[1]), right, statistics, single=single, stored=0.0)


@every_backend
@pytest.mark.parametrize("profile", MERGE_PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("scenario", MERGE_SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_merge_equals_that_of_stored_values(backend: Backend, profile: MergeProfile, scenario: MergeScenario) -> None:
    size = profile.sizes[1]
    state = merge_cache_state(profile, scenario)
    stored = with_values(state | {"value": state["value"][..., :0]}, size)
    attributes = profile.attributes(scenario.budget)
    expected = state_of(oracle.merge_cache(stored, attributes))
    given = stored | {"value": stored["value"][..., :0]}
    actual = with_values(state_of(backend.merge_cache(given, replace(attributes, value_prefix=size))), size)
    single, rounded = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
    assert_same_cache(actual, expected, profile.statistics, single=single, stored=rounded)
    assert_same_rows(actual, expected)
    # The oracle merges values apart from keys: they stay the first numbers of their keys.
    for b, h in np.ndindex(*expected["votes"].shape[:2]):
        head = by_position(expected, b, h)
        assert_near(head["value"], head["key"][..., :size], 1e-12, "the oracle's values")


SMALLER_VALUES = [replace(profile, sizes=(12, 8), sliding_window=0) for profile in cases.MERGE_PROFILES]


@pytest.mark.parametrize("profile", SMALLER_VALUES, ids=lambda profile: profile.name)
def test_values_stay_in_their_keys_with_the_methods_that_declare_it(profile: MergeProfile) -> None:
    state = merge_cache_state(profile, next(x for x in MERGE_SCENARIOS if x.name == "ragged-over-the-budget"))
    state["value"] = np.ascontiguousarray(state["key"][..., :8])
    attributes = profile.attributes(12)
    merged = Torch().merge_cache(state, attributes)
    stays = np.array_equal(merged["present_value"], merged["present_key"][..., :8])
    declared = profile.build_method().merges_values_as_keys and not profile.rotary.inverse_frequencies
    assert stays == declared
    if not declared:
        with pytest.raises(UsageError, match=f"{profile.method} merges values with other weights"):
            replace(attributes, value_prefix=8)


def test_the_binding_of_cuda_refuses_them() -> None:
    backend = CudaBindingOnHost()
    if why := backend.available():
        pytest.skip(f"not reached: {why}")
    inputs, _ = attention_inputs(PROFILES[0], SCENARIOS[0])
    with pytest.raises(Exception, match="VoteAttention: no kernel here reads values from keys"):
        backend.vote_attention(inputs, PROFILES[0].attributes)
    state = merge_cache_state(MERGE_PROFILES[0], MERGE_SCENARIOS[0])
    state["value"] = state["value"][..., :0]
    with pytest.raises(Exception, match="MergeCache: no kernel here reads values from keys"):
        backend.merge_cache(state, replace(MERGE_PROFILES[0].attributes(12), value_prefix=12))
