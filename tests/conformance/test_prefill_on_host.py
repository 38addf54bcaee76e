"""Prefill on tensor cores (plugins/cuda/attention/prefill_mma.h), run on the host in both 16-bit types.

The tests cover the edges of its tiles, and all kinds of chunks. A block takes 128 rows against blocks of 64 slots, or
64 against 32 above 128 elements. The statistics take 128 slots against 64 rows, or 64 against 32. Small cases are
compared with the float64 oracle, large ones with the operator's definition in PyTorch.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvexport.methods.slots import Statistic
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention
from tests.conformance.cases import PROFILES, SCENARIOS, Profile, Scenario, single_precision, vote_attention_inputs
from tests.conformance.comparison import assert_finite, assert_near, assert_same_cache, state_of
from tests.conformance.cuda_library import Caller
from tests.conformance.oracle import vote_attention as oracle
from tests.conformance.test_cuda_on_host import BOTH, ORDERS, WINDOWED, Arrays, assert_same_bits, inputs_of, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture

TOLERANCE = 2e-3
ORDER = (
    "query", "key", "value", "position", "query_length", "past_key", "past_value", "past_votes", "past_score",
    "past_position",
)  # fmt: skip
EMA = (Statistic("log_ema", 0.9),)


def in_float32(inputs: Arrays) -> Arrays:
    return {name: x.astype(np.float32) if x.dtype == np.float16 else x for name, x in inputs.items()}


def hold_to_pytorch(caller: Caller, inputs: Arrays, attributes: VoteAttentionAttributes) -> None:
    exact = {name: torch.from_numpy(x) for name, x in in_float32(inputs).items()}
    sinks = {"sink_logits": exact["sink_logits"]} if "sink_logits" in exact else {}
    expected = vote_attention(*(exact[name] for name in ORDER), attributes=attributes, **sinks)
    actual = in_float32(caller.vote_attention(inputs, attributes))
    output, score, held = expected[0].numpy(), expected[4].numpy(), expected[3].numpy()[:, :, None] > 0
    np.testing.assert_allclose(actual["output"], output, rtol=0, atol=TOLERANCE * max(1, np.abs(output).max()))
    np.testing.assert_allclose(
        np.where(held, actual["present_score"], 0), np.where(held, score, 0), rtol=5e-5, atol=5e-5
    )


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [2, 47], ids=lambda x: f"{x}-tokens")
def test_slots_up_to_and_across_the_edges_of_blocks(caller: Caller, size: int, tokens: int) -> None:
    """Attention is right for full and nearly full blocks of slots, and for empty, full and newly filled caches."""
    inputs = inputs_of((6, 2), (size, size), 195, tokens, [128, 63, 0, 195 - tokens, 195], 2, "float16")
    hold_to_pytorch(caller, inputs, VoteAttentionAttributes(size**-0.5, 1.0, BOTH))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16])
def test_rows_of_every_group_across_the_edges_of_tiles(caller: Caller, group: int) -> None:
    """Attention is right if a chunk ends at the end of a tile or beside it. The second sequence has a token less."""
    tokens = 128 // group + 2
    inputs = inputs_of((group, 1), (64, 64), 70 + tokens, tokens, [70, 5], 2, "float16")
    inputs["query_length"][1] = 128 // group
    hold_to_pytorch(caller, inputs, VoteAttentionAttributes(0.125, 0.7, BOTH))


@pytest.mark.parametrize("sizes", [(128, 64), (64, 128), (192, 128), (24, 200)], ids=lambda x: f"{x[0]}-and-{x[1]}")
def test_keys_and_values_of_other_sizes(caller: Caller, sizes: tuple[int, int]) -> None:
    inputs = inputs_of((4, 2), sizes, 150, 40, [100, 33], 1, "float16")
    hold_to_pytorch(caller, inputs, VoteAttentionAttributes(sizes[0] ** -0.5, 1.0, EMA))


@pytest.mark.parametrize("statistics", [BOTH, WINDOWED, (Statistic(),)], ids=["both", "windowed", "none"])
@pytest.mark.parametrize("window", [0, 90])
def test_windows_softcaps_and_sinks(caller: Caller, statistics: tuple[Statistic, ...], window: int) -> None:
    """Attention is right with a window of 90 positions, softcaps and sinks.

    Positions are two apart, so the window hides whole blocks of slots from some rows, and some blocks from all rows.
    """
    inputs = inputs_of((6, 2), (64, 64), 290, 70, [220, 130, 0, 290], len(statistics), "float16")
    inputs["sink_logits"] = np.linspace(-1, 2, 6).astype(np.float32)
    hold_to_pytorch(
        caller, inputs, VoteAttentionAttributes(0.125, 0.6, statistics, sliding_window=window, softcap=15.0)
    )


def test_a_window_that_some_rows_of_a_tile_have_left(caller: Caller) -> None:
    """A window may include a whole block of slots for the first row of a tile, but only a part for the last row."""
    inputs = inputs_of((1, 1), (64, 64), 460, 140, [300], 1, "float16")
    hold_to_pytorch(caller, inputs, VoteAttentionAttributes(0.125, 1.0, EMA, sliding_window=300))


@pytest.mark.parametrize("scenario", [x for x in SCENARIOS if x.tokens > 1], ids=lambda x: x.name)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda x: x.name)
def test_the_suite_in_16_bits(caller: Caller, profile: Profile, scenario: Scenario) -> None:
    """The conformance suite's cases of chunks hold in float16; most of them are float32 there."""
    sizes = (profile.sizes[0], (profile.sizes[1] + 7) // 8 * 8)  # rows of whole vectors
    inputs = vote_attention_inputs(replace(profile, dtype="float16", sizes=sizes), scenario)
    exact, actual = in_float32(inputs), caller.vote_attention(inputs, profile.attributes)
    expected, output = oracle(exact, profile.attributes), in_float32(actual)["output"]
    assert_finite({"output": output})
    assert_near(output, expected["output"], TOLERANCE, "output")
    actual, expected = state_of(in_float32(actual)), state_of(expected)
    assert_same_cache(
        actual, expected, profile.attributes.statistics, single=single_precision(scenario.peak), stored=0.0
    )


def test_logits_up_to_200_over_many_blocks(caller: Caller) -> None:
    """A row's maximum may change by hundreds between blocks, so that all earlier or all later blocks count nothing."""
    inputs, peak = inputs_of((4, 2), (64, 64), 260, 40, [200, 190], 1), 200.0
    inputs["past_key"] *= np.linspace(0.1, 1, 260)[:, None].astype(np.float32)
    inputs["past_key"][1] = inputs["past_key"][1, :, ::-1]
    logits = np.abs(inputs["query"].reshape(2, 2, 80, 64) @ inputs["past_key"].swapaxes(-1, -2))
    inputs["query"] *= np.float32(peak / logits.max() * 8)
    for name in ("query", "key", "value", "past_key", "past_value"):
        inputs[name] = inputs[name].astype(np.float16)
    attributes = VoteAttentionAttributes(0.125, 1.0, EMA)
    expected, actual = oracle(in_float32(inputs), attributes), in_float32(caller.vote_attention(inputs, attributes))
    np.testing.assert_allclose(
        actual["output"], expected["output"], rtol=0, atol=TOLERANCE * np.abs(expected["output"]).max()
    )
    held = np.asarray(expected["present_votes"])[:, :, None] > 0
    score = np.where(held, expected["present_score"], actual["present_score"])
    np.testing.assert_allclose(actual["present_score"], score, rtol=0, atol=single_precision(peak) * peak)


@pytest.mark.parametrize("size", [80, 256])
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(caller: Caller, size: int) -> None:
    inputs = inputs_of((3, 1), (size, size), 300, 50, [250, 130, 300], 2, "float16")
    attributes, results = VoteAttentionAttributes(0.1, 1.0, BOTH, sliding_window=200), []
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append(caller.vote_attention(inputs, attributes))
    set_host(caller.library)
    assert_same_bits(results)
