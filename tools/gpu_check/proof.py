"""The parts of `gpu_check` that test the kernels. Each takes a target and returns its counts, or raises an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.conformance.cuda_library import COUNTER_BYTES, lacks
from tools.gpu_check.parts import INPUTS, Step, attributes_of, layer, merge_state
from tools.gpu_check.target import Figures, Target

if TYPE_CHECKING:
    from tests.conformance.cases import MergeScenario, Scenario

Arrays = dict[str, np.ndarray]
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}


def conformance(target: Target) -> Figures:
    """Compare every case of the conformance suite with the float64 oracle; on the host only some of them.

    The suite itself runs all cases on the host.
    """
    from tests.conformance import oracle
    from tests.conformance.cases import (
        MERGE_PROFILES,
        MERGE_SCENARIOS,
        PROFILES,
        SCENARIOS,
        merge_cache_state,
        single_precision,
        stored_precision,
        vote_attention_inputs,
    )
    from tests.conformance.comparison import assert_finite, assert_near, assert_same_cache, state_of

    count, errors = 0, dict.fromkeys(TOLERANCE, 0.0)
    lacking = sorted({f"{p.method}: {why}" for p in MERGE_PROFILES if (why := lacks(p.build_method()))})
    scenarios, merge_scenarios = (x[: target.scaled(len(x), 2)] for x in (SCENARIOS, MERGE_SCENARIOS))
    for profile, scenario in itertools.product(PROFILES, scenarios):
        inputs = vote_attention_inputs(profile, scenario)
        for in_place in (True, False):
            actual, expected = (
                target.caller.vote_attention(inputs, profile.attributes, in_place=in_place),
                oracle.vote_attention(inputs, profile.attributes),
            )
            assert_finite(actual)
            single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
            if scenario.peak < 10:  # larger peaks would show float32's rounding of a logit
                errors[profile.dtype] = max(errors[profile.dtype], error_of(actual["output"], expected["output"]))
            assert_near(actual["output"], expected["output"], stored, f"{profile.name}, {scenario.name}: output")
            assert_same_cache(
                state_of(actual),
                state_of(expected),
                profile.attributes.statistics,
                single=single,
                stored=0.0,
                what=f"{profile.name}, {scenario.name}:",
            )
            count += 1
    for profile, scenario in itertools.product(
        (p for p in MERGE_PROFILES if not lacks(p.build_method())), merge_scenarios
    ):
        state = merge_cache_state(profile, scenario)
        attributes = profile.attributes(scenario.capacity if profile.method == "full" else scenario.budget)
        for in_place in (True, False):
            actual = target.caller.merge_cache(state, attributes, in_place=in_place)
            single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
            expected = state_of(oracle.merge_cache(state, attributes))
            assert_same_cache(
                state_of(actual),
                expected,
                profile.statistics,
                single=single,
                stored=stored,
                what=f"{profile.name}, {scenario.name}:",
            )
            count += 1
    count += head_cases(target, scenarios, merge_scenarios)
    large = large_cases(target, errors)
    return {"cases": count, "without a kernel": lacking, "large": large, "largest error": errors, "allowed": TOLERANCE}


def head_cases(target: Target, scenarios: Sequence[Scenario], merges: Sequence[MergeScenario]) -> int:
    """Test per-head budgets: attention against the oracle, and merges against those of each head alone."""
    from tests.conformance import cases, oracle
    from tests.conformance.comparison import assert_near

    count = 0
    for profile, scenario in itertools.product(cases.PROFILES, scenarios):
        heads = cases.heads_of(profile, scenario)
        for inputs, actual in zip(heads, target.caller.vote_attention_of(heads, profile.attributes), strict=True):
            expected, allowed = (
                oracle.vote_attention(inputs, profile.attributes),
                cases.stored_precision(profile.dtype, scenario.peak),
            )
            assert_near(actual["output"], expected["output"], allowed, f"{profile.name}, {scenario.name}: a head")
        count += 1
    for merge, merged in itertools.product((p for p in cases.MERGE_PROFILES if not lacks(p.build_method())), merges):
        states, attributes = cases.states_of(merge, merged)
        for state, own, actual in zip(
            states, attributes, target.caller.merge_cache_of(states, attributes), strict=True
        ):
            alone = target.caller.merge_cache(state, own)
            assert all(actual[name].tobytes() == x.tobytes() for name, x in alone.items()), (
                f"{merge.name}, {merged.name}: a head merges otherwise beside others"
            )
        count += 1
    return count


# Query heads of a KV head, and the size of a head.
LARGE = [(1, 128), (2, 128), (4, 128), (8, 128), (16, 128), (4, 64), (4, 80), (4, 96), (4, 256), (1, 256)]


def large_cases(target: Target, errors: dict[str, float]) -> int:
    """Test caches of many splits in every type.

    A token is compared with the float64 oracle, a chunk with float32 PyTorch on the CPU. `errors` receives the largest
    error of a token's outputs.
    """
    import torch

    from kvexport.ops.vote_attention import vote_attention
    from tests.conformance import oracle

    count, attributes = 0, attributes_of("both")
    for dtype, tokens, (group, size) in itertools.product(
        TOLERANCE, (1, target.scaled(96, 20)), target.scaled(LARGE, LARGE[2:4])
    ):
        what = f"{dtype}, {tokens} tokens, groups of {group}, heads of {size}"
        arrays = layer(2, 2 * group, 2, target.scaled(2500, 200), tokens, len(attributes.statistics), "float32", size)
        inputs = as_stored(arrays, dtype)
        actual = target.caller.vote_attention(inputs, attributes)
        exact = {name: x.astype(np.float32) if x.dtype == np.float16 else x for name, x in inputs.items()}
        if tokens == 1:
            expected = oracle.vote_attention(exact, attributes)
            output, score = expected["output"], expected["present_score"]
        else:
            results = vote_attention(*(torch.from_numpy(exact[name]) for name in INPUTS), attributes=attributes)
            output, score = results[0].numpy(), results[4].numpy()
        error = error_of(actual["output"], output)
        assert error <= TOLERANCE[dtype] * (2 if tokens > 1 else 1), f"{what}: an output is off by {error:.3g}"
        errors[dtype] = max(errors[dtype], error) if tokens == 1 else errors[dtype]
        held = arrays["past_votes"][:, :, None] > 0
        np.testing.assert_allclose(
            np.where(held, actual["present_score"], 0), np.where(held, score, 0), rtol=5e-5, atol=5e-5, err_msg=what
        )
        count += 1
    return count


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, divided by the largest expected magnitude (at least 1)."""
    difference = np.abs(actual.astype(np.float64) - expected)
    return float(difference.max(initial=0.0) / max(1.0, np.abs(expected).max(initial=0.0)))


def as_stored(arrays: Arrays, dtype: str) -> Arrays:
    """Return the float32 inputs of a call with queries, keys and values in another type."""
    kept = ("past_votes", "past_score")
    return {name: x.astype(dtype) if x.dtype == np.float32 and name not in kept else x for name, x in arrays.items()}


def repeat(target: Target) -> Figures:
    """Test that equal inputs give equal bits a thousand times, at shapes of many splits."""
    runs = target.scaled(1000, 3)
    for tokens, times in ((1, runs), (target.scaled(200, 20), max(runs // 10, 2))):
        arrays = layer(2, 16, 4, target.scaled(3000, 300), tokens, 2, "float16")
        state = {name: x for name, x in arrays.items() if name.startswith("past_")}
        step = Step(target, arrays, attributes_of("both"))
        original = {name: step.memory.put(x) for name, x in state.items()}
        first: dict[str, bytes] | None = None
        for _ in range(times):
            for name, x in original.items():
                step.held[name][...] = x
            step()
            bits = {name: step.memory.get(step.held[name]).tobytes() for name in state} | {
                "output": step.memory.get(step.output).tobytes()
            }
            first = first or bits
            assert bits == first, (
                f"bits differ with {tokens} tokens in {[name for name in bits if bits[name] != first[name]]}"
            )
    for method in ("keepkv", "ballot", "zeromerge", "kvslimmer"):
        state, attributes = merge_state(target, method, 2, 4, target.scaled(2048, 200), 2)
        results = [target.caller.merge_cache(state, attributes) for _ in range(max(runs // 20, 2))]
        assert all(x[name].tobytes() == results[0][name].tobytes() for x in results for name in x), (
            f"bits of a merge by {method} differ"
        )
    counters = target.caller.memory.get(target.caller.workspace[:COUNTER_BYTES])
    assert not counters.any(), "a counter did not come back to zero"
    return {"runs": runs}


def sample(target: Target) -> Figures:
    """Run a few calls that reach every kernel, for compute-sanitizer."""
    for (group, size), tokens, dtype in itertools.product(((1, 64), (4, 80), (8, 256), (16, 128)), (1, 40), TOLERANCE):
        arrays = layer(1, group, 1, 300 - group, tokens, 2, "float32", size)
        target.caller.vote_attention(as_stored(arrays, dtype), attributes_of("both"))
    for method in ("keepkv", "ballot", "zeromerge", "kvslimmer", "h2o"):
        for in_order in (True, False):
            target.caller.merge_cache(*merge_state(target, method, 1, 2, 400, 2, in_order=in_order))
    return {}


PARTS: dict[str, Callable[[Target], Figures]] = {"conformance": conformance, "repeat": repeat, "sample": sample}
