"""Both operators over a quantized cache, in every backend that has it, against the float64 oracle."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.conformance.backends import BACKENDS, Backend, CudaBindingOnHost, NativeCpu, reached, state_names
from tests.conformance.cases import (
    MERGE_PROFILES,
    MERGE_SCENARIOS,
    PROFILES,
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
from tests.conformance.comparison import assert_finite, assert_near, assert_scores
from tests.conformance.cuda_library import CudaOnHost
from tests.conformance.oracle import merge_cache, vote_attention
from tests.conformance.quantized import BITS, half_steps, plain, small, stored, unmistakable, wide

Arrays = dict[str, np.ndarray]


def has_it(backend: Backend) -> bool:
    if isinstance(backend, NativeCpu):
        return backend.path() is not None
    return backend.name in ("torch", "onnx-function") or isinstance(backend, CudaOnHost)


def merges_it(backend: Backend) -> bool:
    return not isinstance(backend, CudaOnHost | CudaBindingOnHost)


# A trace takes seconds, so the functions have fewer profiles. k8v4 covers both other types where that suffices.
TRACED = {("h2o-group2", "k8v4"), ("keepkv-key-merge-first", "int8"), ("ballot-places", "int4")}
every_backend = pytest.mark.parametrize(
    ("backend", "cache_type"),
    [
        pytest.param(backend, cache_type, id=f"{backend.name}-{cache_type}")
        for backend in filter(has_it, reached())
        for cache_type in BITS
        if backend.name != "onnx-function" or ("h2o-group2", cache_type) in TRACED
    ],
)
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


def cases(profiles: Sequence[Profile] | Sequence[MergeProfile]) -> list[Any]:
    """Return every backend that this machine runs, with every profile that the backend has."""
    return [
        pytest.param(backend, profile, cache_type, id=f"{backend.name}-{profile.name}-{cache_type}")
        for backend in filter(has_it, reached())
        for i, profile in enumerate(profiles)
        for j, cache_type in enumerate(BITS)
        if backend.name != "onnx-function" or (profile.name, cache_type) in TRACED
        if backend.name == "onnx-function" or cache_type == "int8" or (i + j) % 2
        if isinstance(profile, Profile) or (merges_it(backend) and not backend.lacks(profile.attributes(1)))
    ]


def small_inputs(profile: Profile, scenario: Scenario, cache_type: str) -> Arrays:
    inputs = vote_attention_inputs(profile, scenario)
    rng = np.random.default_rng(zlib.crc32(f"{profile.name}/{scenario.name}".encode()))
    new = {
        name: unmistakable(rng, inputs[name], bits).astype(profile.dtype)
        for name, bits in zip(("key", "value"), BITS[cache_type], strict=True)
    }
    return small(inputs, cache_type, "past_") | new


@pytest.mark.parametrize(("backend", "profile", "cache_type"), cases(PROFILES))
@every_scenario
def test_attention_equals_the_oracle(backend: Backend, profile: Profile, cache_type: str, scenario: Scenario) -> None:
    inputs = small_inputs(profile, scenario, cache_type)
    before = {name: x.copy() for name, x in inputs.items()}
    actual = backend.vote_attention(inputs, profile.attributes)

    assert all((inputs[name] == before[name]).all() for name in before), "an input was written to"
    assert_finite(actual)
    bits = dict(zip(("key", "value"), BITS[cache_type], strict=True))
    new = {name: stored(inputs[name], bits[name]) for name in bits}
    expected = vote_attention(wide(inputs, "past_") | {name: plain(*x) for name, x in new.items()}, profile.attributes)
    assert actual["output"].dtype == inputs["query"].dtype
    # The rotation of a product adds as many roundings again, and cancellation in the sum does not make them smaller.
    single, rounded = 4 * single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
    assert_near(actual["output"], expected["output"], max(single, rounded), "output")
    for b, (used, length) in enumerate(scenario.lanes):
        held = used + length
        assert (actual["output"][b, :, length:] == 0).all(), f"padding rows of sequence {b}"
        for name in ("key", "value"):
            for part, tensor in enumerate((name, f"{name}_scale")):
                got, past = actual[f"present_{tensor}"][b], inputs[f"past_{tensor}"][b]
                assert got.dtype == past.dtype
                assert (got[:, :used] == past[:, :used]).all(), f"{tensor} of sequence {b}: old rows"
                assert (got[:, used:held] == new[name][part][b][:, :length]).all(), (
                    f"{tensor} of sequence {b}: new rows"
                )
                assert length or got.tobytes() == past.tobytes(), f"{tensor} of idle sequence {b}"
        for h in range(profile.heads[1]):
            got, right = actual["present_score"][b, h, :, :held], expected["present_score"][b, h, :, :held]
            assert_scores(got, right, profile.attributes.statistics, single, f"score of sequence {b}, head {h}")


@every_backend
def test_a_long_sequence_keeps_its_attention_output(backend: Backend, cache_type: str) -> None:
    """A sequence of ten times the budget, in chunks and single tokens with merges, stores the same bits as PyTorch."""
    if not merges_it(backend):
        pytest.skip("not reached: there is no kernel that merges a quantized cache")
    profile = next(p for p in PROFILES if p.name == "h2o-group2")
    merge = MergeProfile("h2o", "h2o", sizes=profile.sizes)
    attributes = replace(merge.attributes(8), sinks=1, recent=2)
    rng = np.random.default_rng(3)
    batch, capacity, names = 2, 16, state_names(np.zeros(0, np.int8))
    (query_heads, heads), (key_size, value_size) = profile.heads, profile.sizes
    shapes = {"key": (key_size,), "value": (value_size,)}
    state = {name: np.zeros((batch, heads, capacity, *shapes.get(name, ())), np.float32) for name in names}
    state |= {
        "position": np.zeros((batch, heads, capacity), np.int32),
        "score": np.zeros((batch, heads, 1, capacity), np.float32),
    }
    state |= {name: x for name, x in small(state, cache_type).items() if name in ("key", "value")}
    seen = np.zeros((batch, 1), np.int64)
    torch_too, (key_bits, value_bits) = BACKENDS[0], BITS[cache_type]
    for call in range(36):
        tokens = 8 if call % 3 == 0 else 1
        length = np.array([[tokens], [max(tokens - 3, 1)]])
        inputs = {
            "query": rng.normal(size=(batch, query_heads, tokens, key_size)).astype(np.float32),
            "key": unmistakable(rng, rng.normal(size=(batch, heads, tokens, key_size)), key_bits).astype(np.float32),
            "value": unmistakable(
                rng, rng.normal(size=(batch, heads, tokens, value_size)), value_bits
            ).astype(np.float32),
            "position": seen + np.arange(tokens),
            "query_length": length,
        } | {f"past_{name}": state[name] for name in names}  # fmt: skip
        actual, right = (b.vote_attention(inputs, profile.attributes) for b in (backend, torch_too))
        for name in names:
            assert_near(actual[f"present_{name}"], right[f"present_{name}"].astype(np.float64), 1e-6, name)
        seen += length
        appended = {name: actual[f"present_{name}"] for name in names}
        merged, right = (b.merge_cache(appended, attributes) for b in (backend, torch_too))
        for name in names:  # h2o drops: every slot that stays keeps its bits
            assert (merged[f"present_{name}"] == right[f"present_{name}"]).all(), name
        state = {name: merged[f"present_{name}"] for name in names}
    assert seen.min() > 10 * attributes.budget


@pytest.mark.parametrize(("backend", "profile", "cache_type"), cases(MERGE_PROFILES))
@pytest.mark.parametrize("scenario", MERGE_SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_merge_equals_the_oracle(
    backend: Backend, profile: MergeProfile, cache_type: str, scenario: MergeScenario
) -> None:
    attributes = profile.attributes(scenario.budget)
    state = small(merge_cache_state(profile, scenario), cache_type)
    before = {name: x.copy() for name, x in state.items()}
    actual = backend.merge_cache(state, attributes)

    assert all((state[name] == before[name]).all() for name in before), "an input was written to"
    assert_finite(actual)
    plain_state = wide(state)
    expected = merge_cache(plain_state, attributes)
    single = 4 * single_precision(scenario.peak)
    for b, h in np.ndindex(*state["votes"].shape[:2]):
        where = f"sequence {b}, head {h}"
        votes = expected["present_votes"][b, h]
        kept, used = int((votes > 0).sum()), int((state["votes"][b, h] > 0).sum())
        got = {name: actual[f"present_{name}"][b, h] for name in state}
        assert got["position"][:kept].tolist() == expected["present_position"][b, h][:kept].tolist(), where
        assert_near(got["votes"], votes, single, f"{where}: votes")
        assert_scores(
            got["score"][:, :kept], expected["present_score"][b, h][:, :kept], profile.statistics, single, where
        )
        for name in ("key", "value"):
            scale = f"{name}_scale"
            assert not got[name][attributes.budget :].any() and not got[scale][attributes.budget :].any(), where
            rows, right = plain(got[name], got[scale])[:kept], expected[f"present_{name}"][b, h][:kept]
            old = plain_state[name][b, h][:used]
            for i in range(kept):
                same = np.flatnonzero((old == right[i]).all(-1))
                if len(same):  # neither merged nor rotated: the same bits
                    bits = [(state[name][b, h][j].tobytes(), state[scale][b, h][j]) for j in same]
                    assert (got[name][i].tobytes(), got[scale][i]) in bits, f"{where}: {name} {i} was stored again"
                else:
                    step = np.abs(rows[i] - right[i]).max() / got[scale][i]
                    # Half a step of each number, combined by the rotation back.
                    half = np.linalg.norm(half_steps(got[name][i]))
                    allowed = half + single * np.abs(right[i]).max() / got[scale][i]
                    assert step <= allowed, f"{where}: {name} {i} is {step:.3g} steps off"


@pytest.mark.parametrize("backend", [b for b in reached() if b.name == "native-cpu"], ids=lambda backend: backend.name)
@pytest.mark.parametrize("cache_type", BITS)
def test_a_fit_after_a_merge_equals_the_oracle_over_every_type(backend: Backend, cache_type: str) -> None:
    profile = next(p for p in MERGE_PROFILES if p.name == "attention-matching-after-ballot")
    for scenario in MERGE_SCENARIOS:
        test_a_merge_equals_the_oracle(backend, profile, cache_type, scenario)


@every_backend
@pytest.mark.parametrize("tokens", [1, 3])
def test_zeros_are_stored_as_zeros_and_attended_to(backend: Backend, cache_type: str, tokens: int) -> None:
    """Rows of zeros, and of numbers too small for a scale, have the scale 0 and cause no NaN."""
    profile = next(p for p in PROFILES if p.name == "h2o-group2")
    inputs = small_inputs(profile, Scenario("zeros", 12, tokens, ((5, tokens), (0, tokens))), cache_type)
    inputs["key"][0], inputs["value"][1] = 0.0, 1e-35
    inputs["past_key"][0], inputs["past_key_scale"][0] = 0, 0.0
    actual = backend.vote_attention(inputs, profile.attributes)
    assert_finite(actual)
    assert not actual["present_key"][0].any() and not actual["present_key_scale"][0].any()
    assert not actual["present_value"][1, :, :tokens].any() and not actual["present_value_scale"][1, :, :tokens].any()
    assert not actual["output"][1].any() and actual["output"][0].any()


@every_backend
def test_a_number_that_is_none_is_seen_in_the_output(backend: Backend, cache_type: str) -> None:
    profile = next(p for p in PROFILES if p.name == "h2o-group2")
    for tokens, name in ((1, "key"), (1, "value"), (3, "value")):
        inputs = small_inputs(profile, Scenario("nan", 12, tokens, ((5, tokens), (4, tokens))), cache_type)
        inputs[name][0, :, tokens - 1, 3] = np.nan
        actual = backend.vote_attention(inputs, profile.attributes)
        assert np.isnan(actual["output"][0, :, tokens - 1]).any(), (tokens, name)
        assert np.isfinite(actual["output"][1]).all()
