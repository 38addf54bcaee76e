"""The TensorRT plugins without TensorRT and without a GPU: tests call their methods as TensorRT does.

The calls are in tensorrt_harness.py. The tests need TensorRT's headers. A skipped test has the command that provides
them.
"""

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
from kvexport.schema.state import STATE_NAMES
from tests.conformance.cases import (
    MERGE_PROFILES,
    MERGE_SCENARIOS,
    PROFILES,
    SCENARIOS,
    MergeProfile,
    Profile,
    merge_cache_state,
    single_precision,
    states_of,
    stored_precision,
    vote_attention_inputs,
)
from tests.conformance.cases import heads_of as heads_of_profile
from tests.conformance.comparison import assert_near, assert_same_cache, state_of
from tests.conformance.cuda_library import Caller as DirectCaller
from tests.conformance.cuda_library import HostMemory, lacks
from tests.conformance.layout import of_heads
from tests.conformance.oracle import merge_cache, vote_attention
from tests.conformance.test_cuda_heads import MANY, call_of, heads_of
from tests.conformance.test_cuda_heads_merge import MANY as MANY_THAT_MERGE
from tests.conformance.test_cuda_heads_merge import call_of as merge_call_of
from tests.conformance.test_cuda_heads_merge import heads_of as states_of_heads
from tests.support.tensorrt_harness import (
    ATTENTION,
    BUILD,
    FIELD_CHAR,
    FIELD_INT32,
    FIELD_INT64,
    FLOAT,
    HALF,
    INPUTS,
    INT32,
    INT64,
    MERGE,
    RUNTIME,
    Caller,
    Harness,
    Tensor,
    parsed,
)

Arrays = dict[str, np.ndarray]
B, T = -2, -3  # symbols of the batch and of the number of tokens


def attention_tensors(
    cache: int = HALF,
    batch: int = B,
    tokens: int = T,
    *,
    most: tuple[int, int] = (4, 3),
    sinks: bool = True,
    heads: int = 2,
    slots: int = 192,
    statistics: int = 2,
    values: int = 24,
) -> list[Tensor]:
    """Return inputs of attention with two query heads for each KV head and keys of 16, of which 5 to 9 are the state.

    `most` has the largest batch and number of tokens.
    """

    def tensor(kind: int, *shape: int) -> Tensor:
        return Tensor.of(kind, shape, [most[0] if size == B else most[1] if size == T else size for size in shape])

    new = [(2 * heads, 16), (heads, 16), (heads, values)]
    tensors = [tensor(cache, batch, count, tokens, size) for count, size in new]
    tensors += [tensor(INT64, batch, tokens), tensor(INT64, batch, 1)]
    tensors += [tensor(cache, batch, slots, 16), tensor(cache, batch, slots, values), tensor(FLOAT, batch, slots)]
    tensors += [tensor(FLOAT, batch, statistics, slots), tensor(INT32, batch, slots)]
    return [*tensors, tensor(FLOAT, 4)] if sinks else tensors


def changed(
    tensors: list[Tensor], at: int, kind: int | None = None, shape: tuple[int, ...] | None = None
) -> list[Tensor]:
    old = tensors[at]
    return [*tensors[:at], Tensor.of(old.type if kind is None else kind, shape or old.shape, shape), *tensors[at + 1 :]]


# ---- the plugin's description of itself ----


def test_identity_and_outputs(harness: Harness) -> None:
    attention, merge = harness.create("VoteAttention", ATTENTION), harness.create("MergeCache", MERGE)
    assert attention and merge, harness.log()
    assert (attention.identity, merge.identity) == ("kvexport VoteAttention 1", "kvexport MergeCache 1")
    assert (attention.outputs, merge.outputs) == (6, 5)


def test_every_method_with_a_kernel_is_taken_and_no_other(harness: Harness) -> None:
    for name, method in all_methods().items():
        created = harness.create(
            "MergeCache", parsed(merge_cache_node_attributes([MergeCacheAttributes(method(), 64, 2, 8)] * 2))
        )
        message = harness.log()
        if lacks(method()) is None:
            assert created and not message, f"{name}: {message}"
        else:
            why = "no kernel here fits slots" if method().reference_queries else "the node carries no merge policy"
            assert created is None and f"kvexport: MergeCache: {why}" in message, name


def test_values_that_are_a_part_of_their_keys_are_refused(harness: Harness) -> None:
    prefix = {"value_prefix": (FIELD_INT32, np.array([16], np.int32).tobytes(), 1)}
    for op, fields in (("VoteAttention", ATTENTION), ("MergeCache", MERGE)):
        assert harness.create(op, {**fields, **prefix}) is None
        assert f"kvexport: {op}: no kernel here reads values from keys (value_prefix)" in harness.log()


def test_fields_survive_a_copy_an_engine_and_a_context(harness: Harness) -> None:
    fields = {
        **MERGE,
        "budget": (FIELD_INT64, np.array([64, 64], np.int64).tobytes(), 2),
        "select": (FIELD_CHAR, b"score", 5),
    }
    first, wide = harness.create("MergeCache", MERGE), harness.create("MergeCache", dict(reversed(fields.items())))
    assert first and wide
    identities = {
        p.timing_cache_id for p in (first, wide, *(wide.another(how) for how in ("clone", "again", "attach")))
    }
    assert identities == {first.timing_cache_id}
    other = harness.create("MergeCache", {**MERGE, "budget": (FIELD_INT32, np.array([64, 65], np.int32).tobytes(), 2)})
    assert other and other.timing_cache_id != first.timing_cache_id
    assert {other.another(how).timing_cache_id for how in ("clone", "again", "attach")} == {other.timing_cache_id}
    assert "budget=64,65" in other.timing_cache_id


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("VoteAttention", {"scale": None}, "the field scale is missing; it should be one float32"),
        (
            "VoteAttention",
            {"scale": (FIELD_INT32, b"\1\0\0\0", 1)},
            "the field scale should be one float32, and is 1 int32",
        ),
        ("VoteAttention", {"statistics": (FIELD_CHAR, b"entropy,none\0", 13)}, "statistics is 'entropy'"),
        ("VoteAttention", {"window": (FIELD_INT32, b"\0\0\0\0", 1)}, "recency_weight differ in length: 2, 2, 1, 2"),
        (
            "VoteAttention",
            {"sliding_window": (FIELD_INT64, b"\0" * 7 + b"\1", 1)},
            "the field sliding_window is out of range: 72057594037927936",
        ),
        ("VoteAttention", {"softcap": (0, b"\0\0", 1)}, "the field softcap has the type 0"),
        ("MergeCache", {"budget": (FIELD_INT32, b"\0\0\0\0", 1)}, "budget is 0, and has to be at least 1"),
        ("MergeCache", {"budget": (FIELD_INT32, b"\1\0\0\0", -1)}, "the field budget has -1 elements"),
        ("MergeCache", {"residual": None}, "the field residual is missing"),
        ("MergeCache", {"selector": (FIELD_CHAR, b"own", 3)}, "there is no field selector; known: capacity, budget,"),
        ("VoteAttention", {"budget": (FIELD_INT32, b"\1\0\0\0", 1)}, "there is no field budget; known: scale,"),
        ("VoteAttention", parsed({"capacity": [96, 0]}), "capacity is 0, and has to be at least 1"),
        ("MergeCache", {"budget": None}, "the field budget is missing; it should be int32s"),
        ("MergeCache", parsed({"budget": [24, 16, 8]}), "budget and recent have a number for each KV head, not 3"),
        ("MergeCache", parsed({"capacity": [24, 16, 8]}), "capacity has 3 numbers, and budget 2"),
        ("MergeCache", parsed({"budget": [24, 0]}), "budget is 0, and has to be at least 1"),
        ("MergeCache", parsed({"recent": [-1, 16]}), "recent is -1, and has to be at least 0"),
        ("MergeCache", {"select": None}, "the node carries no merge policy"),
    ],
)
@pytest.mark.parametrize("phase", [BUILD, RUNTIME])
def test_a_bad_field_is_a_reason_in_the_log(
    harness: Harness, op: str, change: dict[str, Any], message: str, phase: int
) -> None:
    fields = {
        name: field for name, field in {**(ATTENTION if op == "VoteAttention" else MERGE), **change}.items() if field
    }
    assert harness.create(op, fields, phase) is None
    log = harness.log()
    assert f"kvexport: {op}: " in log and message in log


# ---- shapes, types, workspace ----


def test_shapes_are_propagated_with_batch_and_tokens_open(harness: Harness) -> None:
    attention, merge = harness.create("VoteAttention", ATTENTION), harness.create("MergeCache", MERGE)
    assert attention and merge
    state = [[B, 192, 16], [B, 192, 24], [B, 192], [B, 2, 192], [B, 192]]
    for sinks in (True, False):
        assert attention.output_shapes(attention_tensors(sinks=sinks)) == [[B, 4, T, 24], *state]
    state[3] = [B, 1, 192]
    assert merge.output_shapes(changed(attention_tensors()[5:10], 3, shape=(B, 1, 192))) == state


@pytest.mark.parametrize("cache", [FLOAT, HALF])
def test_every_type_of_cache_and_nothing_else_is_supported(harness: Harness, cache: int) -> None:
    plugin = harness.create("VoteAttention", ATTENTION)
    state = [cache, cache, FLOAT, FLOAT, INT32]
    types = [cache] * 3 + [INT64, INT64, *state, FLOAT, cache, *state]
    assert plugin.output_types(attention_tensors(cache)) == types[11:]
    tensors = [*attention_tensors(cache), *(Tensor.of(kind, ()) for kind in types[11:])]
    for at, right in enumerate(types):
        for kind in range(12):
            fits = kind == right or (at == 0 and kind in (FLOAT, HALF))  # the first input decides the type
            assert plugin.supports(at, changed(tensors, at, kind)) == fits, (at, kind)
        tensors[at].format = 2
        assert not plugin.supports(at, tensors)
        tensors[at].format = 0


@pytest.mark.parametrize(("at", "kind", "shape", "message"), [
    (0, None, (B, 4, T, 8), "query is [?, 4, ?, 8], not [?, 4, ?, 16]"),
    (2, None, (B, 2, T, 16), "value is [?, 2, ?, 16], not [?, 2, ?, 24]"),
    (4, None, (B, 2), "query_length is [?, 2], not [?, 1]"),
    (7, None, (B, 190), "past_votes is [?, 190], not [?, 192]"),
    (8, None, (B, 1, 192), "past_score is [?, 1, 192], not [?, 2, 192]"),
    (10, None, (2,), "sink_logits is [2], not [4]"), (5, None, (B, 192), "past_key is [?, 192], not [?, 192, ?]"),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_named(
    harness: Harness, at: int, kind: int | None, shape: tuple[int, ...], message: str
) -> None:
    plugin = harness.create("VoteAttention", ATTENTION)
    assert plugin and plugin.output_shapes(changed(attention_tensors(), at, kind, shape)) is None
    assert f"kvexport: VoteAttention: {message}" in harness.log()


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
    attends = op == "VoteAttention"
    plugin = harness.create(
        op, (ATTENTION if attends else MERGE) | (parsed({"capacity": capacity}) if capacity else {})
    )
    tensors = attention_tensors(slots=slots, statistics=2 if attends else 1, sinks=False)
    assert plugin and plugin.output_shapes(tensors if attends else tensors[5:]) is None
    assert f"kvexport: {op}: {message}" in harness.log()


def test_types_and_counts_that_do_not_fit_are_named(harness: Harness) -> None:
    plugin = harness.create("VoteAttention", ATTENTION)
    assert plugin and plugin.output_types(changed(attention_tensors(), 3, INT32)) is None
    assert "input 3 has the type 3, not 8" in harness.log()
    assert plugin.output_shapes(attention_tensors()[:9]) is None
    assert "it has 10 to 11 inputs and 6 outputs, not 9 and 6" in harness.log()


@pytest.mark.parametrize(("tensors", "message"), [
    (changed(attention_tensors(), 5, shape=(B, -1, 16)), "only the batch and the number of tokens may be left"),
    (attention_tensors(most=(4, 97)), "more tokens than a KV head has slots"),
    (attention_tensors(most=(40000, 1)), "more than 65536 KV heads"),
])  # fmt: skip
def test_calls_without_a_kernel_are_refused_when_the_engine_is_built(
    harness: Harness, tensors: list[Tensor], message: str
) -> None:
    plugin = harness.create("VoteAttention", ATTENTION)
    assert plugin and plugin.call("configure", attention_tensors()) == 0, harness.log()
    assert plugin.call("configure", tensors) != 0
    assert message in harness.log()


def test_more_tokens_than_the_smallest_head_has_slots_are_refused_when_the_engine_is_built(harness: Harness) -> None:
    plugin = harness.create("VoteAttention", ATTENTION | parsed({"capacity": [96, 40]}))
    assert plugin and plugin.call("configure", attention_tensors(slots=136, most=(4, 40))) == 0, harness.log()
    assert plugin.call("configure", attention_tensors(slots=136, most=(4, 41))) != 0
    assert "more tokens than a KV head has slots" in harness.log()


def test_a_cache_that_shared_memory_does_not_hold_is_refused_when_the_engine_is_built(harness: Harness) -> None:
    plugin = harness.create("MergeCache", MERGE)
    small, large = (attention_tensors(slots=slots, statistics=1)[5:10] for slots in (192, 100_000))
    assert plugin and plugin.call("configure", small) == 0, harness.log()
    assert plugin.call("configure", large) != 0
    assert "MergeCache: the cache has more slots" in harness.log()


@pytest.mark.parametrize(("slots", "batches"), [((4096, 4096), 4), ((4096, 900, 2000), 64)])
def test_the_workspace_does_for_every_smaller_attention(
    harness: Harness, direct: DirectCaller, slots: tuple[int, ...], batches: int
) -> None:
    """A smaller batch has more splits, and a prompt runs other kernels than a step, so each may need more."""
    attributes = VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9),))
    plugin = harness.create("VoteAttention", parsed(vote_attention_node_attributes(attributes, slots)))
    assert plugin

    def kernels(batch: int, tokens: int) -> int:
        size = ctypes.c_size_t()
        call = call_of(slots, attributes, "float16", batch, 2, 16, tokens)
        assert direct.library.kv_cuda_vote_attention_workspace(call, size) is None
        return size.value

    every = {(batch, tokens): kernels(batch, tokens) for batch in range(1, batches + 1) for tokens in (1, 2, 300)}
    most = max(every.values())
    assert every[batches, 300] < most, "no smaller problem needs more, so the test shows nothing"
    if len({*slots}) == 1:
        assert max(every, key=lambda case: every[case]) != (batches, 1), "no smaller batch needs as much"
    tensors = attention_tensors(
        slots=sum(slots), heads=len(slots), statistics=1, most=(batches, 300), values=16, sinks=False
    )
    assert plugin.call("workspace", tensors) == most + 256  # for its alignment


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
    statistics = len(attributes[0].method.statistics)
    tensors = attention_tensors(slots=sum(slots), heads=3, statistics=statistics, values=16)[5:10]
    assert plugin.call("workspace", tensors) == max(sizes) + 256, harness.log()


# ---- running ----

MERGED = [profile for profile in MERGE_PROFILES if lacks(profile.build_method()) is None]


def assert_same(ones: Sequence[Arrays], others: Sequence[Arrays], where: str = "") -> None:
    for h, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert x.tobytes() == other[name].tobytes(), f"{name} of head {h} {where}"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_attention_is_the_kernels_bits_and_the_oracles_figures(
    harness: Harness, direct: DirectCaller, profile: Profile, in_place: bool
) -> None:
    """The heads have one capacity, and several."""
    caller, statistics = Caller(harness), profile.attributes.statistics
    for scenario in SCENARIOS:
        inputs = vote_attention_inputs(profile, scenario)
        for parts in (heads_of_profile(profile, scenario), [inputs]):
            actual = caller.vote_attention_of(parts, profile.attributes, in_place=in_place)
            assert_same(actual, direct.vote_attention_of(parts, profile.attributes, in_place=in_place), scenario.name)
        if scenario.name in ("one-token-ragged", "idle-lanes"):
            right = vote_attention(inputs, profile.attributes)
            single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
            assert_near(actual[0]["output"], right["output"], stored, scenario.name)
            assert_same_cache(state_of(actual[0]), state_of(right), statistics, single=single, stored=stored)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("profile", MERGED, ids=lambda profile: profile.name)
def test_merges_are_the_kernels_bits_and_the_oracles_figures(
    harness: Harness, direct: DirectCaller, profile: MergeProfile, in_place: bool
) -> None:
    """The heads have one budget, and several."""
    caller = Caller(harness)
    for scenario in MERGE_SCENARIOS:
        state = merge_cache_state(profile, scenario)
        own = profile.attributes(scenario.capacity if profile.method == "full" else scenario.budget)
        for parts, attributes in (states_of(profile, scenario), ([state], [own])):
            actual = caller.merge_cache_of(parts, attributes, in_place=in_place)
            assert_same(actual, direct.merge_cache_of(parts, attributes, in_place=in_place), scenario.name)
        if scenario.name == "ragged-over-the-budget":
            single, stored = single_precision(scenario.peak), stored_precision(profile.dtype, scenario.peak)
            right = state_of(merge_cache(state, own))
            assert_same_cache(state_of(actual[0]), right, profile.statistics, single=single, stored=stored)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_more_heads_than_a_launch_takes_are_one_plugin(harness: Harness, direct: DirectCaller, dtype: str) -> None:
    assert min(len(MANY), len(MANY_THAT_MERGE)) > 32
    heads = heads_of(MANY, 2, dtype=dtype)
    attributes = VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9), Statistic("probability")))
    assert_same(Caller(harness).vote_attention_of(heads, attributes), direct.vote_attention_of(heads, attributes))
    states, merges = states_of_heads("ballot", MANY_THAT_MERGE, dtype)
    assert_same(Caller(harness).merge_cache_of(states, merges), direct.merge_cache_of(states, merges), "after a merge")


def test_one_instance_runs_again_and_again_in_rubbish(harness: Harness) -> None:
    """The kernels' counters belong to the instance. They are zero at first and after every call."""
    attributes = VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9), Statistic("probability")))
    rng, memory = np.random.default_rng(3), HostMemory()
    shapes = {tensor: t.shape for tensor, t in zip(INPUTS, attention_tensors(FLOAT, 1, 1, sinks=False), strict=False)}
    for name in STATE_NAMES:
        shapes[f"past_{name}"] = [2048 if size == 192 else size for size in shapes[f"past_{name}"]]  # several splits
    held = {name: memory.put(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    held["past_votes"][...] = np.tile(np.arange(1024) < 1000, 2)
    held["past_position"] = memory.put(np.tile(np.arange(1024, dtype=np.int32), (1, 2)))
    held["query_length"] = memory.put(np.ones((1, 1), np.int64))
    plugin = harness.create("VoteAttention", ATTENTION)
    plugin = plugin.another("attach")
    workspace = memory.bytes(1 << 20, 0)
    for step in range(3):
        held["position"] = memory.put(np.full((1, 1), 1000 + step, np.int64))
        feed = {name: held[name] for name in INPUTS if name in held}
        of_heads_of = {n.removeprefix("past_"): n for n in feed if n.startswith("past_")}
        right = vote_attention(feed | {x: of_heads(n, feed[x], 2) for n, x in of_heads_of.items()}, attributes)
        output = memory.put(np.zeros((1, 4, 1, 24), np.float32))
        types = [t.type for t in attention_tensors(FLOAT)]
        tensors = [
            Tensor.of(kind, x.shape, data=memory.address(x)) for kind, x in zip(types, feed.values(), strict=False)
        ]
        outputs = [Tensor.of(FLOAT, output.shape, data=memory.address(output)), *tensors[5:]]
        assert plugin.call("workspace", tensors, outputs) <= workspace.nbytes
        workspace[...] = 0xFF
        before = harness.cuda_calls
        assert plugin.call("shape_change", tensors, outputs) == 0, harness.log()
        assert (harness.cuda_calls > before) == (step == 0), "counters are allocated once"
        before = harness.cuda_calls
        assert plugin.call("enqueue", tensors, outputs, ctypes.c_void_p(memory.address(workspace))) == 0, harness.log()
        assert harness.cuda_calls == before, "the plugin copies or allocates memory itself"
        assert_near(output, right["output"], 1e-5, f"step {step}")
    copy = plugin.another("clone")
    del plugin
    workspace[...] = 0xFF
    address = ctypes.c_void_p(memory.address(workspace))
    assert copy.call("enqueue", tensors, outputs, address) == 0, "a clone knows the shapes of its original"


def test_plugins_call_nothing_of_cuda_before_they_know_their_shapes(harness: Harness) -> None:
    before = harness.cuda_calls
    created = [
        harness.create(op, fields)
        for op, fields in (("VoteAttention", ATTENTION), ("MergeCache", MERGE))
        for _ in range(64)
    ]
    assert all(created) and harness.cuda_calls == before
    for plugin in created:
        assert plugin and plugin.timing_cache_id
        plugin.another("clone")
        plugin.another("again")
    assert harness.cuda_calls == before
    assert created[0]
    created[0].another("attach")
    assert harness.cuda_calls == before


def test_running_before_shapes_are_known_is_refused(harness: Harness) -> None:
    plugin = harness.create("VoteAttention", ATTENTION)
    assert plugin and plugin.call("enqueue", attention_tensors(HALF, 1, 1), None, None) != 0
    assert "it was run before it learned its shapes" in harness.log()
