"""Every backend's VoteAttention against the float64 oracle, and the invariants of the contract."""

from functools import cache

import numpy as np
import pytest

from tests.conformance.backends import Backend, reached
from tests.conformance.cases import (
    PROFILES,
    SCENARIOS,
    Profile,
    Scenario,
    single_precision,
    stored_precision,
    vote_attention_inputs,
)
from tests.conformance.comparison import (
    STATE,
    assert_finite,
    assert_near,
    assert_same_cache,
    assert_scores,
    permuted,
    state_of,
)
from tests.conformance.oracle import vote_attention

Arrays = dict[str, np.ndarray]
every_backend = pytest.mark.parametrize("backend", reached(), ids=lambda backend: backend.name)
every_profile = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


@cache
def right(profile: Profile, scenario: Scenario) -> Arrays:
    return vote_attention(vote_attention_inputs(profile, scenario), profile.attributes)


@every_backend
@every_profile
@every_scenario
def test_equals_the_oracle(backend: Backend, profile: Profile, scenario: Scenario) -> None:
    inputs = vote_attention_inputs(profile, scenario)
    before = {name: x.copy() for name, x in inputs.items()}
    actual = backend.vote_attention(inputs, profile.attributes)
    expected = right(profile, scenario)

    assert all((inputs[name] == before[name]).all() for name in before), "an input was written to"
    assert_finite(actual)
    for name, x in actual.items():
        assert x.dtype == (
            inputs["query"].dtype if name == "output" else inputs[name.replace("present", "past")].dtype
        ), name
    single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
    assert_near(actual["output"], expected["output"], stored, "output")
    for b, (used, length) in enumerate(scenario.lanes):
        held = used + length
        for name in ("key", "value", "votes", "position"):
            got, reference = actual[f"present_{name}"][b], expected[f"present_{name}"][b]
            assert (got[:, :held].astype(np.float64) == reference[:, :held]).all(), f"present_{name} of sequence {b}"
        assert (actual["present_votes"][b, :, held:] == 0).all()
        for h in range(profile.heads[1]):
            got, reference = actual["present_score"][b, h, :, :held], expected["present_score"][b, h, :, :held]
            assert_scores(got, reference, profile.attributes.statistics, single, f"score of sequence {b}, head {h}")


@every_backend
@every_profile
@every_scenario
def test_padding_is_zero_and_idle_lanes_are_untouched(backend: Backend, profile: Profile, scenario: Scenario) -> None:
    inputs = vote_attention_inputs(profile, scenario)
    actual = backend.vote_attention(inputs, profile.attributes)
    for b, (_, length) in enumerate(scenario.lanes):
        assert (actual["output"][b, :, length:] == 0).all(), f"padding rows of sequence {b}"
        if length == 0:
            for name in STATE:
                assert actual[f"present_{name}"][b].tobytes() == inputs[f"past_{name}"][b].tobytes(), (
                    f"{name} of idle sequence {b}"
                )


@every_backend
@every_profile
def test_the_order_of_the_slots_and_the_rubbish_in_empty_ones_change_nothing(
    backend: Backend, profile: Profile
) -> None:
    scenario = next(s for s in SCENARIOS if s.name == "chunk-to-the-brim")
    inputs = vote_attention_inputs(profile, scenario)
    other = permuted({name: inputs[f"past_{name}"] for name in STATE}, seed=1)
    empty = other["votes"] == 0
    other["key"][empty] = 60000.0
    other["value"][empty] = -60000.0
    other["position"][empty] = 3
    first = backend.vote_attention(inputs, profile.attributes)
    second = backend.vote_attention(inputs | {f"past_{name}": x for name, x in other.items()}, profile.attributes)
    assert_near(
        second["output"], first["output"].astype(np.float64), stored_precision(profile.dtype, scenario.peak), "output"
    )
    assert_same_cache(state_of(second), state_of(first), profile.attributes.statistics, single=1e-5, stored=0.0)


@every_backend
@every_profile
def test_a_chunk_equals_its_tokens_one_by_one(backend: Backend, profile: Profile) -> None:
    # Windows count the queries of one call, so only statistics without a window must agree.
    scenario = Scenario("one-by-one", 12, 4, ((5, 4), (0, 3), (12, 0)))
    inputs = vote_attention_inputs(profile, scenario)
    whole = backend.vote_attention(inputs, profile.attributes)
    state, output = {name: inputs[f"past_{name}"] for name in STATE}, np.zeros_like(whole["output"])
    for t in range(scenario.tokens):
        step = {name: inputs[name][:, :, t : t + 1] for name in ("query", "key", "value")}
        step |= {
            "position": inputs["position"][:, t : t + 1],
            "query_length": (inputs["query_length"] > t).astype(np.int64),
        }
        step |= {name: inputs[name] for name in ("sink_logits",) if name in inputs} | {
            f"past_{name}": x for name, x in state.items()
        }
        one = backend.vote_attention({name: np.ascontiguousarray(x) for name, x in step.items()}, profile.attributes)
        state, output[:, :, t] = state_of(one), one["output"][:, :, 0]
    assert_near(output, whole["output"].astype(np.float64), stored_precision(profile.dtype, scenario.peak), "output")
    unwindowed = [k for k, s in enumerate(profile.attributes.statistics) if not s.window]
    statistics = tuple(profile.attributes.statistics[k] for k in unwindowed)
    stepped, at_once = (cache | {"score": cache["score"][:, :, unwindowed]} for cache in (state, state_of(whole)))
    assert_same_cache(stepped, at_once, statistics, single=1e-5, stored=0.0)


@every_backend
@pytest.mark.parametrize("capacity", [16, 33, 272, 289])
def test_the_end_of_the_used_slots_is_found_wherever_it_is(backend: Backend, capacity: int) -> None:
    """A new token is appended behind the used slots, in a batch with every number of them."""
    profile = next(p for p in PROFILES if p.name == "keepkv")
    scenario = Scenario(f"every-end-{capacity}", capacity, 1, tuple((used, 1) for used in range(capacity)))
    inputs = vote_attention_inputs(profile, scenario)
    actual = backend.vote_attention(inputs, profile.attributes)
    ends = (actual["present_votes"] > 0).sum(-1)
    assert (ends == 1 + np.arange(capacity)[:, None]).all()
    newest = actual["present_position"][np.arange(capacity)[:, None], np.arange(profile.heads[1]), ends - 1]
    assert (newest == inputs["position"]).all()
