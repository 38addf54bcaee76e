"""A layer that reads another layer's cache with that layer's own queries gets that layer's output."""

import numpy as np
import pytest
import torch

from kvexport.ops.vote_attention import read_attention, vote_attention
from kvexport.schema.state import STATE_NAMES, scales_of
from tests.conformance.cases import (
    PROFILES,
    SCENARIOS,
    Profile,
    Scenario,
    single_precision,
    stored_precision,
    vote_attention_inputs,
)
from tests.conformance.comparison import assert_near
from tests.conformance.oracle import vote_attention as right

TYPES = {"int8": (1, 1), "int4": (2, 2), "k8v4": (1, 2)}  # numbers of a key, and of a value, in one byte


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_equals_the_oracle(profile: Profile, scenario: Scenario) -> None:
    inputs = vote_attention_inputs(profile, scenario)
    expected = right(inputs, profile.attributes)
    state = tuple(
        torch.from_numpy(expected[f"present_{name}"].astype(inputs[f"past_{name}"].dtype)) for name in STATE_NAMES
    )
    query, position, length = (torch.from_numpy(inputs[name]) for name in ("query", "position", "query_length"))
    sinks = torch.from_numpy(inputs["sink_logits"]) if profile.sinks else None
    output = read_attention(query, position, length, state, sinks, attributes=profile.attributes)
    assert output.dtype == query.dtype
    allowed = max(stored_precision(profile.dtype, scenario.peak), single_precision(scenario.peak))
    assert_near(output.numpy(), expected["output"], allowed, "output")


@pytest.mark.parametrize("kind", TYPES)
def test_a_quantized_cache_is_read_as_the_layer_that_has_it_reads_it(kind: str) -> None:
    profile, scenario = PROFILES[1], SCENARIOS[3]
    inputs = {name: torch.from_numpy(x) for name, x in vote_attention_inputs(profile, scenario).items()}
    rng = np.random.default_rng(0)
    key_parts, value_parts = TYPES[kind]
    for name, parts in (("past_key", key_parts), ("past_value", value_parts)):
        shape = (*inputs[name].shape[:3], inputs[name].shape[3] // parts)
        low, high, dtype = (-127, 128, np.int8) if parts == 1 else (0, 256, np.uint8)
        inputs[name] = torch.from_numpy(rng.integers(low, high, shape).astype(dtype))
    scales = [torch.from_numpy(rng.uniform(0.001, 0.02, inputs["past_votes"].shape).astype(np.float32)) for _ in "kv"]
    assert len(scales) == len(scales_of(kind))
    names = ["query", "key", "value", "position", "query_length", *(f"past_{name}" for name in STATE_NAMES)]
    call = (*(inputs[name] for name in names), None, *scales)
    output, *state = vote_attention(*call, attributes=profile.attributes)  # type: ignore[arg-type]
    query, position, length = (inputs[name] for name in ("query", "position", "query_length"))
    read = read_attention(query, position, length, tuple(state), attributes=profile.attributes)
    torch.testing.assert_close(read, output, rtol=0, atol=1e-5)
