"""The plugins over KV heads of several capacities and budgets, without TensorRT and without a GPU."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvexport.methods import all_methods
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import merge_cache_node_attributes, vote_attention_node_attributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from tests.conformance.cases import (
    MERGE_PROFILES,
    MERGE_SCENARIOS,
    PROFILES,
    SCENARIOS,
    MergeProfile,
    Profile,
    states_of,
)
from tests.conformance.cases import heads_of as heads_of_profile
from tests.conformance.cuda_library import Caller as DirectCaller
from tests.conformance.cuda_library import lacks
from tests.conformance.test_cuda_heads import MANY, call_of, heads_of
from tests.conformance.test_cuda_heads_merge import MANY as MANY_THAT_MERGE
from tests.conformance.test_cuda_heads_merge import call_of as merge_call_of
from tests.conformance.test_cuda_heads_merge import heads_of as states_of_heads
from tests.support.tensorrt_harness import (
    ATTENTION,
    FLOAT,
    HALF,
    INT32,
    INT64,
    MERGE,
    Caller,
    Harness,
    Tensor,
    parsed,
)

Arrays = dict[str, np.ndarray]
B, T = -2, -3  # symbols of the batch and of the number of tokens
MERGED = [profile for profile in MERGE_PROFILES if lacks(profile.build_method()) is None]
ATTRIBUTES = VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9), Statistic("probability")))


def assert_same(ones: Sequence[Arrays], others: Sequence[Arrays], where: str = "") -> None:
    for h, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert x.tobytes() == other[name].tobytes(), f"{name} of head {h} {where}"


# ---- running ----


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_attention_is_the_kernels_bits(
    harness: Harness, direct: DirectCaller, profile: Profile, in_place: bool
) -> None:
    """The calls have one token and several, with sink logits and without."""
    hold_attention_of_heads(Caller(harness), direct, profile, in_place)


def hold_attention_of_heads(caller: Caller, direct: DirectCaller, profile: Profile, in_place: bool) -> None:
    for scenario in SCENARIOS:
        heads = heads_of_profile(profile, scenario)
        actual = caller.vote_attention_of(heads, profile.attributes, in_place=in_place)
        assert_same(actual, direct.vote_attention_of(heads, profile.attributes, in_place=in_place), scenario.name)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("profile", MERGED, ids=lambda profile: profile.name)
def test_merges_are_the_kernels_bits(
    harness: Harness, direct: DirectCaller, profile: MergeProfile, in_place: bool
) -> None:
    hold_merges_of_heads(Caller(harness), direct, profile, in_place)


def hold_merges_of_heads(caller: Caller, direct: DirectCaller, profile: MergeProfile, in_place: bool) -> None:
    for scenario in MERGE_SCENARIOS:
        states, attributes = states_of(profile, scenario)
        actual = caller.merge_cache_of(states, attributes, in_place=in_place)
        assert_same(actual, direct.merge_cache_of(states, attributes, in_place=in_place), scenario.name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_more_heads_than_a_launch_takes_are_one_plugin(harness: Harness, direct: DirectCaller, dtype: str) -> None:
    assert min(len(MANY), len(MANY_THAT_MERGE)) > 32
    heads = heads_of(MANY, 2, dtype=dtype)
    actual = Caller(harness).vote_attention_of(heads, ATTRIBUTES)
    assert_same(actual, direct.vote_attention_of(heads, ATTRIBUTES))
    states, attributes = states_of_heads("ballot", MANY_THAT_MERGE, dtype)
    assert_same(
        Caller(harness).merge_cache_of(states, attributes), direct.merge_cache_of(states, attributes), "after a merge"
    )


# ---- the plugin's description of itself ----


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("VoteAttention", {"capacity": [96, 0]}, "capacity is 0, and has to be at least 1"),
        ("MergeCache", {"budget": None}, "the field budget is missing; it should be int32s"),
        ("MergeCache", {"budget": [24, 16, 8]}, "budget and recent have a number for each KV head, not 3 and 2"),
        ("MergeCache", {"capacity": [24, 16, 8]}, "capacity has 3 numbers, and budget 2"),
        ("MergeCache", {"budget": [24, 0]}, "budget is 0, and has to be at least 1"),
        ("MergeCache", {"recent": [-1, 16]}, "recent is -1, and has to be at least 0"),
        ("MergeCache", {"select": None}, "the node carries no merge policy"),
    ],
)
def test_a_bad_field_is_a_reason_in_the_log(harness: Harness, op: str, change: dict[str, Any], message: str) -> None:
    fields = {**(ATTENTION if op == "VoteAttention" else MERGE)}
    for name, value in change.items():
        fields.pop(name, None)
        fields |= {} if value is None else parsed({name: value})
    assert harness.create(op, fields) is None
    assert f"kvexport: {op}: {message}" in harness.log()


def test_the_budget_of_every_head_survives_a_copy_an_engine_and_a_context(harness: Harness) -> None:
    plugins = [harness.create("MergeCache", MERGE | parsed({"budget": [24, x]})) for x in (8, 9)]
    ids = [{p.another(how).timing_cache_id for how in ("clone", "again", "attach")} for p in plugins if p]
    assert len(ids) == 2 and ids[0] != ids[1] and all(len(one) == 1 for one in ids)
    assert "budget=24,8" in next(iter(ids[0]))


def tensors_of(
    op: str, slots: int, statistics: int, heads: int, most: tuple[int, int] = (4, 3), *, values: int = 24
) -> list[Tensor]:
    """Return inputs over KV heads of two query heads, with keys of 16, in float16."""

    def tensor(kind: int, *shape: int) -> Tensor:
        return Tensor.of(kind, shape, [most[0] if x == B else most[1] if x == T else x for x in shape])

    state = [tensor(HALF, B, slots, 16), tensor(HALF, B, slots, values), tensor(FLOAT, B, slots)]
    state += [tensor(FLOAT, B, statistics, slots), tensor(INT32, B, slots)]
    if op == "MergeCache":
        return state
    tokens = [tensor(HALF, B, 2 * heads, T, 16), tensor(HALF, B, heads, T, 16), tensor(HALF, B, heads, T, values)]
    return [*tokens, tensor(INT64, B, T), tensor(INT64, B, 1), *state]


@pytest.mark.parametrize(
    ("op", "capacity", "slots", "message"),
    [
        ("VoteAttention", [96, 40, 64], 200, "capacity has 3 numbers, but there are 2 KV heads"),
        ("VoteAttention", [96, 40], 137, "the sum of capacity is 136, but there are 137 slots"),
        ("VoteAttention", None, 137, "137 slots are not the same number for each of 2 KV heads"),
        ("MergeCache", [96, 40], 137, "the sum of capacity is 136, but there are 137 slots"),
        ("MergeCache", None, 1, "1 slots are not the same number for each of 2 KV heads"),
    ],
)
def test_slots_that_are_not_those_of_the_heads_are_named(
    harness: Harness, op: str, capacity: list[int] | None, slots: int, message: str
) -> None:
    fields = ATTENTION if op == "VoteAttention" else MERGE
    plugin = harness.create(op, fields | (parsed({"capacity": capacity}) if capacity else {}))
    assert plugin and plugin.output_shapes(tensors_of(op, slots, 2 if op == "VoteAttention" else 1, 2)) is None
    assert f"kvexport: {op}: {message}" in harness.log()


def test_more_tokens_than_the_smallest_head_has_slots_are_refused_when_the_engine_is_built(harness: Harness) -> None:
    plugin = harness.create("VoteAttention", ATTENTION | parsed({"capacity": [96, 40]}))
    assert plugin and plugin.call("configure", tensors_of("VoteAttention", 136, 2, 2, (4, 40))) == 0, harness.log()
    assert plugin.call("configure", tensors_of("VoteAttention", 136, 2, 2, (4, 41))) != 0
    assert "more tokens than a KV head has slots" in harness.log()


def test_the_workspace_does_for_every_smaller_attention(harness: Harness, direct: DirectCaller) -> None:
    """A smaller batch has more splits, and a prompt runs other kernels than a step."""
    attributes = VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9),))
    slots, size = (4096, 900, 2000), ctypes.c_size_t()
    plugin = harness.create("VoteAttention", parsed(vote_attention_node_attributes(attributes, slots)))
    assert plugin

    def kernels(batch: int, tokens: int) -> int:
        call = call_of(slots, attributes, "float16", batch, 2, 16, tokens)
        assert direct.library.kv_cuda_vote_attention_workspace(call, size) is None
        return size.value

    tensors = tensors_of("VoteAttention", sum(slots), 1, 3, (64, 300), values=16)
    every = {(batch, tokens): kernels(batch, tokens) for batch in range(1, 65) for tokens in (1, 2, 300)}
    assert plugin.call("workspace", tensors) == max(every.values()) + 256  # for its alignment


def test_the_workspace_does_for_every_smaller_merge(harness: Harness, direct: DirectCaller) -> None:
    slots, budgets, size = (4096, 900, 2000), (4000, 800, 1900), ctypes.c_size_t()
    attributes = [MergeCacheAttributes(all_methods()["ballot"](), budget, 2, 8) for budget in budgets]
    plugin = harness.create("MergeCache", parsed(merge_cache_node_attributes(attributes, slots)))
    assert plugin
    sizes = []
    for batch in range(1, 5):
        call = merge_call_of("ballot", slots, budgets, batch, 16)
        assert direct.library.kv_cuda_merge_cache_workspace(call, size) is None
        sizes.append(size.value)
    tensors = tensors_of("MergeCache", sum(slots), len(attributes[0].method.statistics), 3, values=16)
    assert plugin.call("workspace", tensors) == max(sizes) + 256, harness.log()
