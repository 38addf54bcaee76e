"""Both operators over KV heads of several capacities, used slots, budgets and recent windows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.conformance.backends import Backend, NativeCpu, reached
from tests.conformance.cases import (
    MERGE_PROFILES,
    MERGE_SCENARIOS,
    PROFILES,
    SCENARIOS,
    MergeProfile,
    MergeScenario,
    Profile,
    Scenario,
    heads_of,
    single_precision,
    states_of,
    stored_precision,
)
from tests.conformance.comparison import assert_finite, assert_near, assert_scores
from tests.conformance.oracle import vote_attention
from tests.conformance.quantized import BITS, small

Arrays = dict[str, np.ndarray]
NATIVE = [backend for backend in reached() if backend.name == "native-cpu"]
TRACED = ("h2o-group2", "sinks-sliding-window-group8", "ballot")  # a trace takes seconds
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
every_merge_scenario = pytest.mark.parametrize("scenario", MERGE_SCENARIOS, ids=lambda scenario: scenario.name)
# One-token and chunked calls, to the brim, with splits, and with large logits.
SOME = [s for s in SCENARIOS if s.name in ("one-token-ragged", "chunk-to-the-brim", "logits-of-200", "several-blocks")]


def cases(profiles: Sequence[Profile] | Sequence[MergeProfile]) -> list[Any]:
    return [
        pytest.param(backend, profile, id=f"{profile.name}-{backend.name}")
        for backend in reached()
        for profile in profiles
        if backend.name != "onnx-function" or profile.name in TRACED
        if isinstance(profile, Profile) or not backend.lacks(profile.attributes(1))
    ]


@pytest.mark.parametrize(("backend", "profile"), cases(PROFILES))
@every_scenario
def test_attention_equals_the_oracle_of_each_head(backend: Backend, profile: Profile, scenario: Scenario) -> None:
    heads = heads_of(profile, scenario)
    before = [{name: x.copy() for name, x in inputs.items()} for inputs in heads]
    actual = backend.vote_attention_of(heads, profile.attributes)
    single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
    for h, (inputs, got) in enumerate(zip(heads, actual, strict=True)):
        assert all((inputs[name] == x).all() for name, x in before[h].items()), "an input was written to"
        assert_finite(got)
        expected = vote_attention(inputs, profile.attributes)
        assert_near(got["output"], expected["output"], stored, f"output of head {h}")
        for b, length in enumerate(inputs["query_length"][:, 0]):
            held = int((inputs["past_votes"][b, 0] > 0).sum() + length)
            for name in ("key", "value", "votes", "position"):
                x, y = (z[f"present_{name}"][b, 0, :held].astype(np.float64) for z in (got, expected))
                assert (x == y).all(), f"present_{name} of sequence {b}, head {h}"
            assert (got["present_votes"][b, 0, held:] == 0).all()
            scores = (z["present_score"][b, 0, :, :held] for z in (got, expected))
            assert_scores(*scores, profile.attributes.statistics, single, f"score of sequence {b}, head {h}")


@pytest.mark.parametrize(("backend", "profile"), cases(MERGE_PROFILES))
@every_merge_scenario
def test_merge_gives_the_bits_of_a_merge_of_each_head(
    backend: Backend, profile: MergeProfile, scenario: MergeScenario
) -> None:
    """The merges of single heads equal the oracle (test_merge_cache.py)."""
    states, attributes = states_of(profile, scenario)
    before = [{name: x.copy() for name, x in state.items()} for state in states]
    actual = backend.merge_cache_of(states, attributes)
    for h, (state, own, got) in enumerate(zip(states, attributes, actual, strict=True)):
        assert all((state[name] == x).all() for name, x in before[h].items()), "an input was written to"
        for name, expected in backend.merge_cache(state, own).items():
            assert got[name].tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("backend", NATIVE, ids=lambda backend: backend.name)
@pytest.mark.parametrize("cache_type", [*BITS, "ring"])
@pytest.mark.parametrize("scenario", SOME, ids=lambda scenario: scenario.name)
def test_attention_gives_the_bits_of_a_node_for_each_head(
    backend: NativeCpu, cache_type: str, scenario: Scenario
) -> None:
    """Quantized caches and rings of reference queries are in one node what they are in nodes of single heads."""
    profile = next(p for p in PROFILES if p.name == "h2o-group2")
    heads, attributes = heads_of(profile, scenario), profile.attributes
    if cache_type == "ring":
        method = next(p for p in MERGE_PROFILES if p.name == "grkv-places").build_method()
        attributes = replace(attributes, method=method)
        for inputs in heads:
            rng, batch = np.random.default_rng(2), len(inputs["query"])
            inputs["past_query"] = rng.normal(size=(batch, 1, 6, profile.sizes[0])).astype(np.float32)
            inputs["past_query_seen"] = np.arange(batch * 6, dtype=np.int32).reshape(batch, 1, 6)
    else:
        heads = [small(inputs, cache_type, "past_") for inputs in heads]
    actual = backend.vote_attention_of(heads, attributes)
    for inputs, got in zip(heads, actual, strict=True):
        for name, expected in backend.vote_attention(inputs, attributes).items():
            assert got[name].tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("backend", NATIVE, ids=lambda backend: backend.name)
@pytest.mark.parametrize("cache_type", BITS)
@every_merge_scenario
def test_a_quantized_merge_gives_the_bits_of_a_node_for_each_head(
    backend: NativeCpu, cache_type: str, scenario: MergeScenario
) -> None:
    profile = next(p for p in MERGE_PROFILES if p.name == "ballot-places")
    states, attributes = states_of(replace(profile, sizes=(8, 12)), scenario)
    states = [small(state, cache_type) for state in states]
    actual = backend.merge_cache_of(states, attributes)
    for state, own, got in zip(states, attributes, actual, strict=True):
        for name, expected in backend.merge_cache(state, own).items():
            assert got[name].tobytes() == expected.tobytes(), name
