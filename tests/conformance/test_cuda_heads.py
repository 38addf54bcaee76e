"""The CUDA kernels over KV heads of several capacities, run on the host: one launch for up to 32 heads.

The conformance suite (test_heads.py) has three heads. Here are more heads than a launch takes, empty, full and single
slots, splits of very different numbers, all types, and properties that the host can show.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvexport.methods.slots import Statistic
from kvexport.ops.vote_attention import VoteAttentionAttributes
from tests.conformance.cuda_library import COUNTER_BYTES, TYPES, Caller, HostMemory, host_list, vote_attention_call
from tests.conformance.quantized import BITS, small
from tests.conformance.test_cuda_on_host import BOTH, ORDERS, compare, inputs_of, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture

Arrays = dict[str, np.ndarray]
TABLE = 32  # the most heads of a launch
FEW = (96, 1, 700, 33)
MANY = (*FEW, *range(40, 73))
TOLERANCES = {"float32": 1e-5, "float16": 2e-3}


def heads_of(
    capacities: Sequence[int],
    group: int,
    sizes: tuple[int, int] = (16, 24),
    dtype: str = "float32",
    tokens: int = 1,
    statistics: int = 2,
) -> list[Arrays]:
    heads = []
    for h, capacity in enumerate(capacities):
        used = [capacity - tokens, 0, (capacity - tokens) // 2, capacity]
        inputs = inputs_of((group, 1), sizes, capacity, tokens, used, statistics, dtype)
        rng = np.random.default_rng(h)
        for name in ("query", "key", "value", "past_key", "past_value"):
            x = rng.normal(size=inputs[name].shape)
            inputs[name] = x.astype(dtype)
        heads.append(inputs)
    position = np.max([inputs["position"] for inputs in heads], axis=0)
    shared = {"position": position, "query_length": np.array([[tokens]] * 3 + [[0]])}
    return [inputs | shared for inputs in heads]


def call_of(
    capacities: Sequence[int],
    attributes: VoteAttentionAttributes,
    cache_type: str,
    batch: int,
    group: int,
    size: int,
    tokens: int = 1,
) -> Any:
    shape = (batch, len(capacities), max(capacities), size)
    query = (batch, len(capacities) * group, tokens, size)
    dtype = "float16" if cache_type in BITS else cache_type
    call = vote_attention_call(attributes, dtype, query, shape, size, capacities)
    call.cache_type = TYPES[cache_type]
    return call


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("capacities", [FEW, MANY], ids=["few", "many"])
def test_heads_of_several_capacities_equal_the_oracle(
    caller: Caller, dtype: str, group: int, capacities: tuple[int, ...]
) -> None:
    set_host(caller.library, multiprocessors=9)
    heads = heads_of(capacities, group, dtype=dtype)
    attributes = VoteAttentionAttributes(0.3, 0.7, BOTH, sliding_window=300, softcap=20.0)
    for inputs in heads:
        inputs["sink_logits"] = np.linspace(-1, 2, group).astype(np.float32)
    actual = caller.vote_attention_of(heads, attributes)
    for inputs, got in zip(heads, actual, strict=True):
        compare(inputs, got, attributes, TOLERANCES[dtype])
    set_host(caller.library)
    assert_same_heads(actual, caller.vote_attention_of(heads, attributes, in_place=False), exact=False)


def assert_same_heads(ones: list[Arrays], others: list[Arrays], *, exact: bool = True) -> None:
    for one, other in zip(ones, others, strict=True):
        for name, x in one.items():
            if exact:
                assert x.tobytes() == other[name].tobytes(), name
            elif name in ("present_key", "present_value", "present_votes", "present_position"):
                assert (x == other[name]).all(), name


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(caller: Caller, dtype: str) -> None:
    heads, attributes = heads_of(MANY, 4, dtype=dtype), VoteAttentionAttributes(0.3, 1.0, BOTH)
    results = []
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append(caller.vote_attention_of(heads, attributes))
    set_host(caller.library)
    for other in results[1:]:
        assert_same_heads(results[0], other)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_no_bit_depends_on_whether_a_state_is_updated_in_place(caller: Caller, dtype: str) -> None:
    heads, attributes = heads_of(FEW, 4, dtype=dtype), VoteAttentionAttributes(0.3, 1.0, BOTH)
    ones, others = (caller.vote_attention_of(heads, attributes, in_place=x) for x in (True, False))
    assert_same_heads(ones, others)


def chunks_of(cache_type: str, capacities: Sequence[int], group: int, tokens: int, batch: int = 4) -> list[Arrays]:
    """Return the inputs of each KV head: one sequence of the last has a shorter chunk, and one has none."""
    sizes = (16, 12 if cache_type in BITS else 24)
    heads = heads_of(capacities, group, sizes, "float32" if cache_type in BITS else cache_type, tokens)
    length = np.array([[tokens], [tokens], [max(1, tokens - 1)], [0]])
    heads = [{name: x[:batch].copy() for name, x in (inputs | {"query_length": length}).items()} for inputs in heads]
    for h, inputs in enumerate(heads):
        inputs["sink_logits"] = np.linspace(0.1 * h - 1, 1.5, group).astype(np.float32)
    return [small(inputs, cache_type, "past_") if cache_type in BITS else inputs for inputs in heads]


@pytest.mark.parametrize("cache_type", [*TOLERANCES, *BITS])
@pytest.mark.parametrize(("tokens", "group"), [(2, 1), (5, 3), (17, 16), (64, 8)])
def test_prompts_give_the_bits_of_a_call_for_each_head(
    caller: Caller, cache_type: str, tokens: int, group: int
) -> None:
    """Heads of one launch are more than a table has, or few, whose capacities are full, empty and half full."""
    attributes = VoteAttentionAttributes(0.3, 0.7, BOTH, sliding_window=50, softcap=20.0)
    calls = [((96, tokens, 300 if tokens < 64 else 150, 70), 4), ((70, 290), 1)]
    if tokens == 2:
        calls.append((tuple(range(40, 41 + TABLE)), 2))
    for capacities, batch in calls:
        heads = chunks_of(cache_type, capacities, group, tokens, batch)
        actual = caller.vote_attention_of(heads, attributes)
        assert_same_heads(actual, [caller.vote_attention(inputs, attributes) for inputs in heads])
        assert_same_heads(actual, caller.vote_attention_of(heads, attributes, in_place=False))


@pytest.mark.parametrize("cache_type", BITS)
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_a_step_over_quantized_caches_equals_a_call_for_each_head(caller: Caller, cache_type: str, group: int) -> None:
    """The heads' splits differ from those of single heads: numbers differ by rounding, stored rows do not."""
    attributes = VoteAttentionAttributes(0.3, 0.7, BOTH, sliding_window=300, softcap=20.0)
    for capacities, multiprocessors in ((FEW, 9), (MANY, 132)):
        heads = chunks_of(cache_type, capacities, group, 1)
        set_host(caller.library, multiprocessors=multiprocessors)
        actual = caller.vote_attention_of(heads, attributes)
        set_host(caller.library)
        expected = [caller.vote_attention(inputs, attributes) for inputs in heads]
        for h, (got, own) in enumerate(zip(actual, expected, strict=True)):
            for name, x in own.items():
                if name in ("output", "present_score"):
                    np.testing.assert_allclose(got[name], x, rtol=2e-5, atol=2e-5, err_msg=f"{name} of head {h}")
                else:
                    assert got[name].tobytes() == x.tobytes(), f"{name} of head {h}"


def test_the_workspace_is_enough_for_any_device_and_its_counters_come_back_to_zero(caller: Caller) -> None:
    heads, fresh = heads_of(MANY, 2), Caller(caller.library, HostMemory())
    fresh.vote_attention_of(heads, VoteAttentionAttributes(0.3, 1.0, BOTH))
    assert not fresh.workspace[:COUNTER_BYTES].any()


# ---- refusals ----


@pytest.mark.parametrize(("change", "message"), [
    ({"capacity": (96, 0, 701, 33)}, "a KV head has no slots"),
    ({"capacity": (96, 1, 701, 33)}, "more or fewer slots than the state"),
    ({"tokens": 2}, "more tokens than a KV head has slots"), ({"query_heads": 6}, "not a multiple"),
    ({"key_size": 10}, "16-byte vectors"),
])  # fmt: skip
def test_refusals_have_a_reason(caller: Caller, change: dict[str, Any], message: str) -> None:
    call = call_of(FEW, VoteAttentionAttributes(0.3, 1.0, (Statistic(),)), "float32", 2, 2, 16)
    for name, value in change.items():
        host_list(call, name, value) if name == "capacity" else setattr(call, name, value)
    with pytest.raises(RuntimeError, match=message):
        caller.prepared("vote_attention", ctypes.byref(call))
