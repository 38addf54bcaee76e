"""Every backend's MergeCache against the float64 oracle, the contract's invariants, and long runs of both operators."""

from dataclasses import replace

import numpy as np
import pytest

from kvexport.methods import all_methods
from kvexport.ops.merge_cache import MergeCacheAttributes
from tests.conformance.backends import Backend, Torch, reached
from tests.conformance.cases import (
    BY_PLACE,
    MERGE_PROFILES,
    MERGE_SCENARIOS,
    PROFILES,
    RECENT,
    SINKS,
    MergeProfile,
    MergeScenario,
    merge_cache_state,
    single_precision,
    stored_precision,
)
from tests.conformance.comparison import (
    STATE,
    assert_finite,
    assert_near,
    assert_same_cache,
    assert_same_rows,
    by_position,
    permuted,
    state_of,
)
from tests.conformance.oracle import merge_cache, vote_attention
from tests.conformance.oracle_rules import RULES

Arrays = dict[str, np.ndarray]
# Each backend runs the profiles for which it has a kernel. test_backends.py lists the others.
every_merge = pytest.mark.parametrize(
    ("backend", "profile"),
    [
        pytest.param(backend, profile, id=f"{profile.name}-{backend.name}")
        for backend in reached()
        for profile in MERGE_PROFILES
        if backend.lacks(profile.attributes(1)) is None
    ],
)
every_scenario = pytest.mark.parametrize("scenario", MERGE_SCENARIOS, ids=lambda scenario: scenario.name)


def attributes_of(profile: MergeProfile, scenario: MergeScenario) -> MergeCacheAttributes:
    return profile.attributes(scenario.capacity if profile.method == "full" else scenario.budget)


def right(state: Arrays, attributes: MergeCacheAttributes) -> Arrays:
    """Return the oracle's cache, or PyTorch's for a method that the oracle does not have."""
    knows = attributes.method.name in RULES or not attributes.method.compresses
    return state_of(merge_cache(state, attributes) if knows else Torch().merge_cache(state, attributes))


def test_the_oracle_knows_every_method() -> None:
    assert {name for name, method in all_methods().items() if method.compresses} == set(RULES)


@every_merge
@every_scenario
def test_equals_the_oracle(backend: Backend, profile: MergeProfile, scenario: MergeScenario) -> None:
    state = merge_cache_state(profile, scenario)
    before = {name: x.copy() for name, x in state.items()}
    attributes = attributes_of(profile, scenario)
    actual = backend.merge_cache(state, attributes)

    assert all((state[name] == before[name]).all() for name in STATE), "an input was written to"
    assert_finite(actual)
    assert all(actual[f"present_{name}"].dtype == state[name].dtype for name in STATE)
    expected = right(state, attributes)
    assert_same_cache(
        state_of(actual),
        expected,
        profile.statistics,
        single=single_precision(scenario.peak),
        stored=stored_precision(profile.dtype, scenario.peak),
    )
    assert_same_rows(state_of(actual), expected)


@pytest.mark.parametrize("backend", [b for b in reached() if b.name == "native-cpu"], ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@every_scenario
def test_a_fit_after_a_merge_whose_keys_are_turned_equals_the_oracle(
    backend: Backend, dtype: str, scenario: MergeScenario
) -> None:
    """This profile is not among MERGE_PROFILES, because the functions take seconds to trace each of those."""
    profile = next(p for p in MERGE_PROFILES if p.name == "attention-matching-after-ballot")
    test_equals_the_oracle(backend, replace(profile, dtype=dtype, rotary=BY_PLACE), scenario)


@every_merge
@every_scenario
def test_keeps_the_budget_the_sinks_and_the_recent(
    backend: Backend, profile: MergeProfile, scenario: MergeScenario
) -> None:
    state = merge_cache_state(profile, scenario)
    attributes = attributes_of(profile, scenario)
    actual = state_of(backend.merge_cache(state, attributes))
    for b, row in enumerate(scenario.used):
        for h in range(len(row)):
            old, new = by_position(state, b, h), by_position(actual, b, h)
            now = old["position"].max(initial=-1)
            inside = old["position"] > (now - profile.sliding_window if profile.sliding_window else -1)
            assert len(new["position"]) == min(inside.sum(), attributes.budget)
            safe = inside & (old["position"] < SINKS)
            if not attributes.method.recent_receives:
                safe |= inside & (old["position"] > now - RECENT)
            kept = np.isin(new["position"], old["position"][safe])
            if profile.rotary.cache_positions:  # rotated: only the length is compared, and sinks do not change
                rows = (new["key"][kept], old["key"][safe])
                lengths = [np.linalg.norm(x.astype(np.float64), axis=-1) for x in rows]
                np.testing.assert_allclose(*lengths, rtol=stored_precision(profile.dtype, 1.0))
                safe, kept = safe & (old["position"] < SINKS), kept & (new["position"] < SINKS)
            for name in STATE:
                slots = (..., safe, slice(None)) if name in ("key", "value") else (..., safe)
                kept_slots = (..., kept, slice(None)) if name in ("key", "value") else (..., kept)
                assert (new[name][kept_slots] == old[name][slots]).all(), f"{name} of a protected slot changed"


@pytest.mark.parametrize("backend", [b for b in reached() if b.name in ("torch", "native-cpu")], ids=lambda b: b.name)
@pytest.mark.parametrize("profile", [p for p in MERGE_PROFILES if not p.sliding_window], ids=lambda p: p.name)
def test_a_cache_whose_capacity_is_its_budget_stays_as_it_is(backend: Backend, profile: MergeProfile) -> None:
    attributes = profile.attributes(12)
    if problem := backend.lacks(attributes):
        pytest.skip(problem)
    state = merge_cache_state(profile, MergeScenario("capacity-is-the-budget", 12, 12, ((12, 12), (0, 5))))
    actual = state_of(backend.merge_cache(state, attributes))
    for b, h in np.ndindex(2, profile.kv_heads):
        before, after = by_position(state, b, h), by_position(actual, b, h)
        assert all((after[name] == before[name]).all() for name in STATE)


@every_merge
def test_the_order_of_the_slots_changes_nothing(backend: Backend, profile: MergeProfile) -> None:
    scenario = next(s for s in MERGE_SCENARIOS if s.name == "ragged-over-the-budget")
    attributes = attributes_of(profile, scenario)
    state = merge_cache_state(profile, scenario)
    first, second = (state_of(backend.merge_cache(x, attributes)) for x in (state, permuted(state, seed=2)))
    stored = stored_precision(profile.dtype, scenario.peak)
    assert_same_cache(second, first, profile.statistics, single=1e-5, stored=stored)


@pytest.mark.parametrize("backend", reached(), ids=lambda backend: backend.name)
def test_positions_are_of_any_size(backend: Backend) -> None:
    profile = replace(next(p for p in MERGE_PROFILES if p.name == "h2o"), sliding_window=0)
    scenario = next(s for s in MERGE_SCENARIOS if s.name == "ragged-over-the-budget")
    attributes, state = attributes_of(profile, scenario), permuted(merge_cache_state(profile, scenario), seed=4)
    spread = np.sort(np.random.default_rng(5).integers(SINKS, 2**31 - 2, scenario.capacity)).astype(np.int32)
    assert len(set(spread.tolist())) == scenario.capacity
    for b, h in np.ndindex(*state["votes"].shape[:2]):
        held = state["position"][b, h, : int((state["votes"][b, h] > 0).sum())]
        held[:] = np.where(held < SINKS, held, spread[np.argsort(np.argsort(held))])
    actual, expected = state_of(backend.merge_cache(state, attributes)), right(state, attributes)
    assert_same_cache(actual, expected, profile.statistics, single=1e-5, stored=0.0)
    assert_same_rows(actual, expected)


NO_PLACES = [p for p in MERGE_PROFILES if not p.sliding_window and not p.rotary.cache_positions]


@pytest.mark.parametrize(
    ("backend", "profile"),
    [
        pytest.param(backend, profile, id=f"{profile.name}-{backend.name}")
        for backend in reached()
        for profile in NO_PLACES
        if backend.lacks(profile.attributes(1)) is None
    ],
)
@pytest.mark.parametrize("name", ["one-over", "ragged-over-the-budget", "far-beyond-the-budget"])
def test_slots_of_lowered_positions_are_sinks(backend: Backend, profile: MergeProfile, name: str) -> None:
    """The engine pins a slot by lowering its position below 0. Pins are in several places of each sequence.

    A sequence has the same pins in all heads, as far as they hold them.
    """
    scenario = next(s for s in MERGE_SCENARIOS if s.name == name)
    attributes, state = attributes_of(profile, scenario), permuted(merge_cache_state(profile, scenario), seed=3)
    rng, was_pinned = np.random.default_rng(11), np.zeros(state["votes"].shape, bool)
    for b in range(len(scenario.used)):
        used = state["votes"][b] > 0
        if not used.any():
            continue
        pins = rng.choice(np.unique(state["position"][b][used]), size=3, replace=False)
        was_pinned[b] = used & np.isin(state["position"][b], pins)
    length = int(state["position"].max()) + 1
    state["position"] = np.where(was_pinned, state["position"] - length, state["position"]).astype(np.int32)
    actual, expected = state_of(backend.merge_cache(state, attributes)), right(state, attributes)
    single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
    assert_same_cache(actual, expected, profile.statistics, single=single, stored=stored)
    assert_same_rows(actual, expected)
    for b, h in np.ndindex(*was_pinned.shape[:2]):
        before, after = by_position(state, b, h), by_position(actual, b, h)
        old, new = (x["position"] < 0 for x in (before, after))
        assert old.sum() == was_pinned[b, h].sum() == new.sum()
        for tensor in STATE:
            slots = (slice(None),) if tensor in ("key", "value") else ()
            assert (after[tensor][(..., new, *slots)] == before[tensor][(..., old, *slots)]).all(), tensor


@every_merge
def test_a_sequence_does_not_depend_on_its_batch(backend: Backend, profile: MergeProfile) -> None:
    scenario = next(s for s in MERGE_SCENARIOS if s.name == "ragged-over-the-budget")
    attributes = attributes_of(profile, scenario)
    state = merge_cache_state(profile, scenario)
    together = state_of(backend.merge_cache(state, attributes))
    for b in range(len(scenario.used)):
        alone = state_of(backend.merge_cache({name: x[b : b + 1] for name, x in state.items()}, attributes))
        of_batch = {name: x[b : b + 1] for name, x in together.items()}
        stored = stored_precision(profile.dtype, scenario.peak)
        assert_same_cache(alone, of_batch, profile.statistics, single=1e-5, stored=stored, what=f"alone, of row {b}:")


RUNS = [
    ("keepkv", "streaming"),
    ("keepkv", "keepkv-key-evict"),
    ("keepkv", "keepkv-vote-evict"),
    ("keepkv", "keepkv-mean-merge-first"),
    ("h2o-group2", "h2o"),
    ("half-group2", "keepkv-vote-merge-first-half"),
]


@pytest.mark.parametrize("backend", reached(), ids=lambda backend: backend.name)
@pytest.mark.parametrize(("attention", "merging"), RUNS, ids=lambda name: name)
def test_a_long_ragged_run_equals_the_oracle_at_every_step(backend: Backend, attention: str, merging: str) -> None:
    """A ragged run over five times the budget, in chunks and single tokens, equals the oracle at every step.

    The cache is merged when the next call would not fit. The oracle starts every step from the backend's own cache, so
    that a tie that rounding broke early does not cause a later difference.
    """
    profile = next(p for p in PROFILES if p.name == attention)
    merge_profile = next(p for p in MERGE_PROFILES if p.name == merging)
    merge_profile = replace(merge_profile, kv_heads=profile.heads[1], sizes=profile.sizes, dtype=profile.dtype)
    statistics, budget, tokens = profile.attributes.statistics, 10, 4
    batch, (query_heads, heads), (key_size, value_size) = 3, profile.heads, profile.sizes
    capacity = budget + tokens
    shapes = {"key": (key_size,), "value": (value_size,), "votes": (), "position": ()}
    types = {"key": profile.dtype, "value": profile.dtype, "votes": "float32", "position": "int32"}
    state = {name: np.zeros((batch, heads, capacity, *shape), types[name]) for name, shape in shapes.items()}
    state["score"] = np.zeros((batch, heads, 1, capacity), np.float32)
    rng = np.random.default_rng(3)
    seen = np.zeros((batch, 1), np.int64)
    tolerances = {"single": 1e-5, "stored": stored_precision(profile.dtype, 1.0)}
    centre = rng.normal(size=(4, key_size))
    while seen.min() < 5 * budget:
        t = int(rng.choice([1, 2, tokens]))
        length = rng.integers(0, t + 1, size=(batch, 1))
        if ((state["votes"] > 0).sum(-1) + length[:, :1]).max() > capacity or rng.random() < 0.2:
            attributes = merge_profile.attributes(budget)
            merged, expected = (state_of(x(state, attributes)) for x in (backend.merge_cache, merge_cache))
            assert_same_cache(merged, expected, statistics, **tolerances, what=f"after {seen.ravel()}:")
            assert_same_rows(merged, expected, f"after {seen.ravel()}:")
            state = merged
        key = centre[rng.integers(0, 4, (batch, heads, t))] + 0.4 * rng.normal(size=(batch, heads, t, key_size))
        inputs: Arrays = {"query": rng.normal(size=(batch, query_heads, t, key_size)), "key": key}
        inputs["value"] = rng.normal(size=(batch, heads, t, value_size))
        inputs = {name: x.astype(profile.dtype) for name, x in inputs.items()}
        inputs |= {
            "position": seen + np.arange(t),
            "query_length": length,
            **{f"past_{name}": x for name, x in state.items()},
        }
        actual = backend.vote_attention(inputs, profile.attributes)
        expected = vote_attention(inputs, profile.attributes)
        assert_finite(actual)
        assert_near(actual["output"], expected["output"], tolerances["stored"], "output")
        assert_same_cache(state_of(actual), state_of(expected), statistics, **tolerances, what=f"after {seen.ravel()}:")
        state, seen = state_of(actual), seen + length
