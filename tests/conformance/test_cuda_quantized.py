"""The CUDA kernels over a quantized cache, run on the host, beyond the cases of the conformance suite."""

from typing import Any

import numpy as np
import pytest

from kvexport.ops.vote_attention import VoteAttentionAttributes
from tests.conformance.cases import single_precision
from tests.conformance.cuda_library import Caller, vote_attention_call
from tests.conformance.oracle import vote_attention
from tests.conformance.quantized import BITS, plain, small, stored, unmistakable, wide
from tests.conformance.test_cuda_on_host import (
    BOTH,
    EDGES,
    ORDERS,
    WINDOWED,
    Arrays,
    assert_same_bits,
    caller,  # noqa: F401 - a fixture
    inputs_of,
    set_host,
)

NEW = ("query", "key", "value")
every_type = pytest.mark.parametrize("cache_type", BITS)


def small_inputs(cache_type: str, *shape: Any, dtype: str = "float32", peak: float = 0.0) -> Arrays:
    """Return `inputs_of` over a quantized cache, with NaN and arbitrary numbers in empty slots."""
    x = inputs_of(*shape, peak=peak)
    rng = np.random.default_rng(4)
    x |= {name: unmistakable(rng, x[name], bits) for name, bits in zip(("key", "value"), BITS[cache_type], strict=True)}
    x = small(x, cache_type, "past_")
    empty = x["past_votes"] == 0
    for name in ("key", "value"):
        x[f"past_{name}"][empty] = 0x55
        x[f"past_{name}_scale"][empty] = np.nan
    return x | {name: x[name].astype(dtype) for name in NEW}


def hold_to_oracle(
    caller: Caller,  # noqa: F811
    inputs: Arrays,
    attributes: VoteAttentionAttributes,
    cache_type: str,
    tolerance: float = 4e-5,
    single: float = 4e-5,
) -> None:
    actual = caller.vote_attention(inputs, attributes)
    clean = inputs | {f"past_{n}_scale": np.nan_to_num(inputs[f"past_{n}_scale"]) for n in ("key", "value")}
    new = {}
    for name, bits in zip(("key", "value"), BITS[cache_type], strict=True):
        right = stored(inputs[name], bits)
        for part, tensor in enumerate((name, f"{name}_scale")):
            new_rows, before = actual[f"present_{tensor}"], inputs[f"past_{tensor}"]
            for b, length in enumerate(inputs["query_length"][:, 0]):
                used = int((inputs["past_votes"][b, 0] > 0).sum())
                assert new_rows[b, :, :used].tobytes() == before[b, :, :used].tobytes(), f"{tensor} of sequence {b}"
                assert (new_rows[b, :, used : used + length] == right[part][b, :, :length]).all(), (
                    f"new {tensor} of {b}"
                )
        new[name] = plain(*right)
    expected = vote_attention(wide(clean, "past_") | new, attributes)
    allowed = tolerance * max(1, np.abs(expected["output"]).max())
    np.testing.assert_allclose(actual["output"], expected["output"], rtol=0, atol=allowed)
    held = np.asarray(expected["present_votes"]) > 0
    score = np.where(held[:, :, None], expected["present_score"], actual["present_score"])
    np.testing.assert_allclose(actual["present_score"], score, rtol=single, atol=single)
    for name in ("votes", "position"):
        right_ones = np.asarray(expected[f"present_{name}"])
        assert (actual[f"present_{name}"][held] == right_ones[held]).all(), name


@every_type
@pytest.mark.parametrize("size", [64, 80, 96, 128, 136, 256])
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_head_size(caller: Caller, cache_type: str, size: int, tokens: int) -> None:  # noqa: F811
    set_host(caller.library)
    inputs = small_inputs(cache_type, (4, 2), (size, size), 100, tokens, [70, 37], 2)
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(size**-0.5, 1.0, BOTH), cache_type)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 11, 16])
def test_decode_at_every_edge_of_a_split_for_many_groups(caller: Caller, group: int) -> None:  # noqa: F811
    set_host(caller.library, multiprocessors=18)
    cache_type = list(BITS)[group % 3]
    used = [*EDGES[group % 4 :: 4], 419, 0, 32]
    inputs = small_inputs(cache_type, (group, 1), (24, 20), 420, 1, used, 2, dtype=("float16", "float32")[group % 2])
    inputs["sink_logits"] = np.linspace(-1, 2, group).astype(np.float32)
    attributes = VoteAttentionAttributes(0.2, 0.7, BOTH, sliding_window=group % 3 * 150, softcap=group % 2 * 20.0)
    hold_to_oracle(caller, inputs, attributes, cache_type, 4e-5 if group % 2 else 2e-3)


@every_type
@pytest.mark.parametrize("tokens", [1, 5])
def test_queries_of_16_bits(caller: Caller, cache_type: str, tokens: int) -> None:  # noqa: F811
    set_host(caller.library)
    inputs = small_inputs(cache_type, (6, 2), (32, 16), 90, tokens, [80, 20], 2, dtype="float16")
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(0.2, 1.0, BOTH), cache_type, 2e-3)


@every_type
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("statistics", [BOTH, WINDOWED], ids=["both", "windowed"])
def test_window_softcap_and_sinks(caller: Caller, cache_type: str, tokens: int, statistics: Any) -> None:  # noqa: F811
    set_host(caller.library)
    inputs = small_inputs(cache_type, (6, 2), (16, 8), 200, tokens, [160, 150, 0, 200], len(statistics))
    inputs["sink_logits"] = np.linspace(-1, 2, 6).astype(np.float32)
    attributes = VoteAttentionAttributes(0.25, 0.6, statistics, sliding_window=90, softcap=15.0)
    hold_to_oracle(caller, inputs, attributes, cache_type)


@every_type
def test_logits_of_200_and_scales_far_apart(caller: Caller, cache_type: str) -> None:  # noqa: F811
    """Attention is right for logits of 200, for values whose scales vary by 2^60, and for queries of any size."""
    set_host(caller.library)
    inputs = small_inputs(cache_type, (4, 2), (64, 64), 150, 1, [140, 40], 2, peak=200.0)
    single = 4 * single_precision(200.0)
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(1.0, 1.0, BOTH), cache_type, single, single)
    inputs = small_inputs(cache_type, (4, 2), (64, 64), 150, 1, [140, 40], 2)
    inputs["past_value_scale"] *= np.float32(2.0) ** np.random.default_rng(1).integers(-30, 31, (2, 2, 150))
    for factor in (1e-12, 1e12):
        tiny = inputs | {"query": inputs["query"] * np.float32(factor)}
        hold_to_oracle(caller, tiny, VoteAttentionAttributes(0.1 / factor, 1.0, BOTH), cache_type)


@every_type
@pytest.mark.parametrize("tokens", [1, 12])
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(
    caller: Caller,  # noqa: F811
    cache_type: str,
    tokens: int,
) -> None:
    inputs = small_inputs(cache_type, (8, 2), (64, 40), 200, tokens, [185, 130], 2)
    attributes = VoteAttentionAttributes(0.1, 1.0, BOTH, sliding_window=150)
    results = []
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append(caller.vote_attention(inputs, attributes))
    for limit in (30000, 232448):  # the limit of shared memory, which changes the number of stages that fit
        set_host(caller.library, shared_limit=limit)
        results.append(caller.vote_attention(inputs, attributes))
    set_host(caller.library)
    apart = caller.vote_attention(inputs, attributes, in_place=False)
    assert_same_bits([*results, apart])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_size": 34}, "a head size of a quantized cache is not a multiple of 4"),
        ({"query_type": 2}, "the type of the query is neither float32 nor float16"),
    ],
)
def test_refusals_have_a_reason(caller: Caller, change: dict[str, int], message: str) -> None:  # noqa: F811
    shape = (2, 2, 600, 32)
    call = vote_attention_call(VoteAttentionAttributes(0.1, 1.0, BOTH), "float32", (2, 4, 1, 32), shape, 32)
    call.cache_type = 4
    for name, value in change.items():
        setattr(call, name, value)
    with pytest.raises(RuntimeError, match=message):
        caller.prepared("vote_attention", call)


def test_a_quantized_cache_without_scales_is_refused(caller: Caller) -> None:  # noqa: F811
    shape = (1, 1, 8, 32)
    call = vote_attention_call(VoteAttentionAttributes(0.1, 1.0, BOTH), "float32", (1, 1, 1, 32), shape, 32)
    call.cache_type = 3
    with pytest.raises(RuntimeError, match="a quantized cache has no scales"):
        caller.prepared("vote_attention", call)()
