"""The plugins over KV heads that have caches of their own, without TensorRT and without a GPU.

The nodes are those that `for_tensorrt` converts. A result has the bits of a direct call of the kernels, which
tests/conformance compares with the oracles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from kvexport.backends.tensorrt.graphs import CACHES, for_tensorrt
from kvexport.methods import all_methods
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import vote_attention_node_attributes
from kvexport.ops.ragged import ragged_node_attributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION, Operator, ragged
from kvexport.schema.state import STATE_NAMES
from tests.conformance.cases import MERGE_PROFILES, MERGE_SCENARIOS, PROFILES, SCENARIOS, MergeProfile, Profile
from tests.conformance.cuda_library import Caller as DirectCaller
from tests.conformance.cuda_library import HostMemory, bfloat16, lacks
from tests.conformance.ragged import join
from tests.conformance.test_cuda_ragged import MANY, heads_of, ragged_call
from tests.conformance.test_cuda_ragged_merge import MANY as MANY_THAT_MERGE
from tests.conformance.test_cuda_ragged_merge import call_of
from tests.conformance.test_cuda_ragged_merge import heads_of as states_of_heads
from tests.conformance.test_ragged import heads_of as heads_of_profile
from tests.conformance.test_ragged import states_of
from tests.support.tensorrt_harness import (
    BF16,
    FLOAT,
    HALF,
    INT32,
    INT64,
    RAGGED_ATTENTION,
    RAGGED_MERGE,
    Caller,
    Harness,
    Tensor,
    fields_of,
    parsed,
)

Arrays = dict[str, np.ndarray]
B, T = -2, -3  # symbols of the batch and of the number of tokens
SLOTS = (96, 40, 64)  # of the caches in the shapes below
MERGED = [profile for profile in MERGE_PROFILES if lacks(profile.build_method()) is None]
ATTRIBUTES = VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9), Statistic("probability")))


def converted(operator: Operator, inputs: Sequence[str], attributes: dict[str, Any]) -> onnx.NodeProto:
    """Return a node as `for_tensorrt` converts it. The names of past tensors begin with `past_`."""
    node = helper.make_node(operator.name, inputs, operator.output_names, domain="kvexport", **attributes)
    seen, whys = for_tensorrt(helper.make_model(helper.make_graph([node], "g", [], [])), lambda _: None)
    (node,) = seen.graph.node
    assert whys == {operator.name: ""}
    return node


def of_cache(result: Arrays, h: int) -> Arrays:
    return {name.rpartition(".")[0]: x for name, x in result.items() if name.endswith(f".{h}")}


def attention_through(
    caller: Caller, heads: Sequence[Arrays], attributes: VoteAttentionAttributes, *, in_place: bool = True
) -> list[Arrays]:
    """Return the outputs of each KV head from one plugin, as `cuda_library.Caller.ragged_vote_attention` does."""
    operator, tensors = ragged(VOTE_ATTENTION, len(heads)), join(heads, "past_")
    names = [name if name in tensors else "" for name in operator.input_names]
    node = converted(operator, names, vote_attention_node_attributes(attributes))
    assert fields_of(node)[CACHES] == parsed({CACHES: len(heads)})[CACHES]
    result = caller.node(node, tensors, in_place=in_place)
    parts = np.split(result["output"], len(heads), 1)
    return [{"output": part, **of_cache(result, h)} for h, part in enumerate(parts)]


def merge_through(
    caller: Caller, states: Sequence[Arrays], attributes: Sequence[MergeCacheAttributes], *, in_place: bool = True
) -> list[Arrays]:
    """Return the caches of each KV head from one plugin, as `cuda_library.Caller.ragged_merge_cache` does."""
    operator = ragged(MERGE_CACHE, len(states))
    names = [f"past_{name}" for name in operator.input_names]
    tensors = {f"past_{name}": x for name, x in join([{n: s[n] for n in STATE_NAMES} for s in states]).items()}
    result = caller.node(converted(operator, names, ragged_node_attributes(attributes)), tensors, in_place=in_place)
    return [of_cache(result, h) for h in range(len(states))]


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
    hold_ragged_attention(Caller(harness), direct, profile, in_place)


def hold_ragged_attention(caller: Caller, direct: DirectCaller, profile: Profile, in_place: bool) -> None:
    for scenario in SCENARIOS:
        heads = heads_of_profile(profile, scenario)
        actual = attention_through(caller, heads, profile.attributes, in_place=in_place)
        expected = direct.ragged_vote_attention(heads, profile.attributes, in_place=in_place)
        assert_same(actual, expected, scenario.name)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("profile", MERGED, ids=lambda profile: profile.name)
def test_merges_are_the_kernels_bits(
    harness: Harness, direct: DirectCaller, profile: MergeProfile, in_place: bool
) -> None:
    hold_ragged_merges(Caller(harness), direct, profile, in_place)


def hold_ragged_merges(caller: Caller, direct: DirectCaller, profile: MergeProfile, in_place: bool) -> None:
    for scenario in MERGE_SCENARIOS:
        states, attributes = states_of(profile, scenario)
        actual = merge_through(caller, states, attributes, in_place=in_place)
        expected = direct.ragged_merge_cache(states, attributes, in_place=in_place)
        assert_same(actual, expected, scenario.name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_more_heads_than_a_launch_takes_are_one_plugin(harness: Harness, direct: DirectCaller, dtype: str) -> None:
    assert min(len(MANY), len(MANY_THAT_MERGE)) > 32
    heads = heads_of(MANY, 2, dtype=dtype)
    actual = attention_through(Caller(harness), heads, ATTRIBUTES)
    assert_same(actual, direct.ragged_vote_attention(heads, ATTRIBUTES))
    states, attributes = states_of_heads("ballot", MANY_THAT_MERGE, dtype)
    assert_same(merge_through(Caller(harness), states, attributes), direct.ragged_merge_cache(states, attributes))


def test_one_instance_runs_again_and_again_in_rubbish(harness: Harness, direct: DirectCaller) -> None:
    """One plugin instance runs on a workspace that other layers use in between: its counters are its own."""
    heads, memory = heads_of((1024, 96), 2, dtype="float32"), HostMemory()
    tensors = join(heads, "past_")
    names = [name for name in ragged(VOTE_ATTENTION, 2).input_names if name in tensors]
    plugin = harness.create("RaggedVoteAttention", {**RAGGED_ATTENTION, **parsed({CACHES: 2})})
    assert plugin
    plugin = plugin.another("attach")
    workspace, output = memory.bytes(1 << 22, 0), memory.put(np.zeros((4, 4, 1, 24), np.float32))
    kinds = {"float32": FLOAT, "int32": INT32, "int64": INT64}
    right: Any = None
    for _ in range(3):
        held = {name: memory.put(tensors[name]) for name in names}
        inputs = [Tensor.of(kinds[x.dtype.name], x.shape, data=memory.address(x)) for x in held.values()]
        outputs = [Tensor.of(FLOAT, output.shape, data=memory.address(output)), *inputs[5:]]
        assert plugin.call("workspace", inputs, outputs) <= workspace.nbytes
        workspace[...] = 0xFF
        before = harness.cuda_calls
        assert plugin.call("shape_change", inputs, outputs) == 0, harness.log()
        address = ctypes.c_void_p(memory.address(workspace))
        assert plugin.call("enqueue", inputs, outputs, address) == 0, harness.log()
        assert harness.cuda_calls == before, "the plugin copies or allocates memory itself"
        right = right if right is not None else output.copy()
        assert right.any() and output.tobytes() == right.tobytes()
        plugin = plugin.another("clone")  # it knows the shapes of its original


# ---- the plugin's description of itself ----


@pytest.mark.parametrize("alias_state", [0, 1])
def test_every_state_tensor_of_every_cache_is_aliased_if_the_field_asks(harness: Harness, alias_state: int) -> None:
    field = parsed({"alias_state": alias_state})
    aliases = {"RaggedVoteAttention": [-1, *range(5, 20)], "RaggedMergeCache": [*range(15)]}
    for op, fields in (("RaggedVoteAttention", RAGGED_ATTENTION), ("RaggedMergeCache", RAGGED_MERGE)):
        plugin = harness.create(op, {**fields, **field})
        assert plugin and plugin.identity == f"kvexport {op} 1", harness.log()
        for one in (plugin, *(plugin.another(how) for how in ("clone", "again", "attach"))):
            assert one.timing_cache_id == plugin.timing_cache_id
            expected = aliases[op] if alias_state else [-1] * len(aliases[op])
            assert [one.aliased(i) for i in range(one.outputs)] == expected


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("RaggedVoteAttention", {CACHES: None}, "the field caches is missing; it should be one int32"),
        ("RaggedVoteAttention", {CACHES: 0}, "caches is 0, and has to be 1 to 65536"),
        ("RaggedVoteAttention", {CACHES: 65537}, "caches is 65537, and has to be 1 to 65536"),
        ("RaggedVoteAttention", {"scale": None}, "the field scale is missing"),
        ("RaggedMergeCache", {"budget": None}, "the field budget is missing; it should be int32s"),
        (
            "RaggedMergeCache",
            {"budget": [24, 16]},
            "budget and recent have a number for each cache, not 2 and 3",
        ),
        ("RaggedMergeCache", {"budget": [24, 0, 16]}, "budget is 0, and has to be at least 1"),
        ("RaggedMergeCache", {"recent": [24, -1, 16]}, "recent is -1, and has to be at least 0"),
        ("RaggedMergeCache", {"select": None}, "the node carries no merge policy"),
        ("RaggedMergeCache", {"value_prefix": 16}, "no kernel here reads values from keys (value_prefix)"),
        ("RaggedMergeCache", {CACHES: 3}, "there is no field caches; known: budget, sinks,"),
    ],
)
def test_a_bad_field_is_a_reason_in_the_log(harness: Harness, op: str, change: dict[str, Any], message: str) -> None:
    fields = {**(RAGGED_ATTENTION if op == "RaggedVoteAttention" else RAGGED_MERGE)}
    for name, value in change.items():
        fields.pop(name, None)
        fields |= {} if value is None else parsed({name: value})
    assert harness.create(op, fields) is None
    assert f"kvexport: {op}: {message}" in harness.log()


def test_the_budget_of_every_cache_survives_a_copy_an_engine_and_a_context(harness: Harness) -> None:
    plugins = [harness.create("RaggedMergeCache", RAGGED_MERGE | parsed({"budget": [24, x, 16]})) for x in (8, 9)]
    ids = [{p.another(how).timing_cache_id for how in ("clone", "again", "attach")} for p in plugins if p]
    assert len(ids) == 2 and ids[0] != ids[1] and all(len(one) == 1 for one in ids)
    assert "budget=24,8,16" in next(iter(ids[0]))


def tensors_of(op: str, kind: int = HALF, most: tuple[int, int] = (4, 3), *, sinks: bool = True) -> list[Tensor]:
    """Return inputs over three KV heads of two query heads, with keys of 16 and values of 24.

    `most` has the largest batch and number of tokens.
    """

    def tensor(kind: int, *shape: int) -> Tensor:
        return Tensor.of(kind, shape, [most[0] if x == B else most[1] if x == T else x for x in shape])

    state = []
    statistics = 2 if op == "RaggedVoteAttention" else 1
    for slots in SLOTS:
        state += [tensor(kind, B, 1, slots, 16), tensor(kind, B, 1, slots, 24), tensor(FLOAT, B, 1, slots)]
        state += [tensor(FLOAT, B, 1, statistics, slots), tensor(INT32, B, 1, slots)]
    if op == "RaggedMergeCache":
        return state
    tokens = [tensor(kind, B, 6, T, 16), tensor(kind, B, 3, T, 16), tensor(kind, B, 3, T, 24)]
    return [*tokens, tensor(INT64, B, T), tensor(INT64, B, 1), *state, *([tensor(FLOAT, 6)] if sinks else [])]


def changed(tensors: list[Tensor], at: int, *shape: int) -> list[Tensor]:
    return [*tensors[:at], Tensor.of(tensors[at].type, shape), *tensors[at + 1 :]]


SEVEN_HEADS = changed(tensors_of("RaggedVoteAttention", sinks=False), 0, 4, 7, 3, 16)
FIELDS = {"RaggedVoteAttention": RAGGED_ATTENTION, "RaggedMergeCache": RAGGED_MERGE}
every_operator = pytest.mark.parametrize("op", FIELDS)


@every_operator
def test_shapes_are_propagated_with_batch_and_tokens_open(harness: Harness, op: str) -> None:
    plugin = harness.create(op, FIELDS[op])
    assert plugin
    first = 5 if op == "RaggedVoteAttention" else 0
    for sinks in (True, False):
        tensors = tensors_of(op, sinks=sinks)
        state = [x.shape for x in tensors[first : first + 15]]
        assert plugin.output_shapes(tensors) == [*([[B, 6, T, 24]] if first else []), *state], harness.log()
        assert plugin.call("configure", tensors) == 0, harness.log()


@every_operator
@pytest.mark.parametrize("cache", [FLOAT, HALF, BF16])
def test_every_type_of_cache_and_nothing_else_is_supported(harness: Harness, op: str, cache: int) -> None:
    plugin, tensors = harness.create(op, FIELDS[op]), tensors_of(op, cache)
    assert plugin
    first = 5 if op == "RaggedVoteAttention" else 0
    answer = [*([cache] if first else []), *(x.type for x in tensors[first : first + 15])]
    assert plugin.output_types(tensors) == answer
    tensors += [Tensor.of(kind, ()) for kind in answer]
    for at, right in enumerate([x.type for x in tensors]):
        for kind in range(12):
            fits = kind == right or (at == 0 and kind in (FLOAT, HALF, BF16))  # the first input decides the type
            other = [*tensors[:at], Tensor.of(kind, ()), *tensors[at + 1 :]]
            assert plugin.supports(at, other) == fits, (at, kind)


@pytest.mark.parametrize(
    ("op", "at", "shape", "message"),
    [
        ("RaggedVoteAttention", 1, (B, 2, T, 16), "key is [?, 2, ?, 16], not [?, 3, ?, 16]"),
        ("RaggedVoteAttention", 10, (B, 2, 40, 16), "past_key of cache 1 is [?, 2, 40, 16], not [?, 1, 40, 16]"),
        ("RaggedVoteAttention", 17, (B, 1, 65), "past_votes of cache 2 is [?, 1, 65], not [?, 1, 64]"),
        ("RaggedVoteAttention", 20, (5,), "sink_logits is [5], not [6]"),
        ("RaggedMergeCache", 6, (B, 1, 40, 16), "value of cache 1 is [?, 1, 40, 16], not [?, 1, 40, 24]"),
        ("RaggedMergeCache", 13, (B, 1, 2, 64), "score of cache 2 is [?, 1, 2, 64], not [?, 1, 1, 64]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    harness: Harness, op: str, at: int, shape: tuple[int, ...], message: str
) -> None:
    plugin = harness.create(op, FIELDS[op])
    assert plugin and plugin.output_shapes(changed(tensors_of(op), at, *shape)) is None
    assert f"kvexport: {op}: {message}" in harness.log()


@every_operator
def test_another_number_of_caches_is_named(harness: Harness, op: str) -> None:
    plugin = harness.create(op, FIELDS[op])
    assert plugin and plugin.output_shapes(tensors_of(op)[:-6]) is None
    numbers = "20 to 21 inputs and 16" if op == "RaggedVoteAttention" else "15 inputs and 15"
    assert f"kvexport: {op}: it has {numbers} outputs" in harness.log()


@every_operator
def test_the_slots_of_every_cache_are_fixed(harness: Harness, op: str) -> None:
    plugin, first = harness.create(op, FIELDS[op]), 5 if op == "RaggedVoteAttention" else 0
    tensors = tensors_of(op)
    tensors[first + 10] = Tensor.of(HALF, (B, 1, -1, 16), (4, 1, 64, 16))
    assert plugin and plugin.call("configure", tensors) != 0
    assert "only the batch and the number of tokens may be left open" in harness.log()


@pytest.mark.parametrize(
    ("op", "tensors", "message"),
    [
        ("RaggedVoteAttention", tensors_of("RaggedVoteAttention", most=(4, 41)), "more tokens than the cache has"),
        ("RaggedVoteAttention", SEVEN_HEADS, "query heads"),
        ("RaggedMergeCache", tensors_of("RaggedMergeCache", most=(40000, 1)), "more than 65536 KV heads"),
    ],
)
def test_calls_without_a_kernel_are_refused_when_the_engine_is_built(
    harness: Harness, op: str, tensors: list[Tensor], message: str
) -> None:
    plugin = harness.create(op, FIELDS[op])
    assert plugin and plugin.call("configure", tensors_of(op)) == 0, harness.log()
    assert plugin.call("configure", tensors) != 0
    assert message in harness.log()


def test_the_workspace_does_for_every_smaller_attention(harness: Harness, direct: DirectCaller) -> None:
    """A smaller batch has more splits, and a prompt runs other kernels than a step."""
    attributes = VoteAttentionAttributes(0.25, 1.0, (Statistic("log_ema", 0.9),))
    slots, size = (4096, 900, 2000), ctypes.c_size_t()
    fields = {**parsed(vote_attention_node_attributes(attributes)), **parsed({CACHES: 3})}
    plugin = harness.create("RaggedVoteAttention", fields)
    assert plugin

    def kernels(batch: int, tokens: int) -> int:
        call, caches = ragged_call(slots, attributes, "float16", batch, 2, 16)
        call.tokens = tokens
        ask = direct.library.kv_cuda_ragged_vote_attention_workspace
        assert ask(ctypes.byref(call), caches, ctypes.byref(size)) is None
        return size.value

    most = (64, 300)
    state: list[Tensor] = []
    for n in slots:
        shapes = ((HALF, n, 16), (HALF, n, 16), (FLOAT, n), (FLOAT, 1, n), (INT32, n))
        state += [Tensor.of(kind, (B, 1, *shape), (most[0], 1, *shape)) for kind, *shape in shapes]
    rows = ((6, T, 16), (3, T, 16), (3, T, 16))
    tensors = [Tensor.of(HALF, (B, *shape), (most[0], shape[0], most[1], 16)) for shape in rows]
    tensors += [Tensor.of(INT64, (B, T), most), Tensor.of(INT64, (B, 1), (most[0], 1)), *state]
    every = {(batch, tokens): kernels(batch, tokens) for batch in range(1, 65) for tokens in (1, 2, 300)}
    assert plugin.call("workspace", tensors) == max(every.values()) + 256  # for its alignment


def test_the_workspace_does_for_every_smaller_merge(harness: Harness, direct: DirectCaller) -> None:
    slots, budgets, size = (4096, 900, 2000), (4000, 800, 1900), ctypes.c_size_t()
    attributes = [MergeCacheAttributes(all_methods()["ballot"](), budget, 2, 8) for budget in budgets]
    plugin = harness.create("RaggedMergeCache", parsed(ragged_node_attributes(attributes)))
    assert plugin
    count, sizes = len(attributes[0].method.statistics), []
    for batch in range(1, 5):
        call, caches = call_of("ballot", slots, budgets, batch, 16)
        ask = direct.library.kv_cuda_ragged_merge_cache_workspace
        assert ask(ctypes.byref(call), caches, ctypes.byref(size)) is None
        sizes.append(size.value)
    tensors: list[Tensor] = []
    for n in slots:
        shapes = ((HALF, n, 16), (HALF, n, 16), (FLOAT, n), (FLOAT, count, n), (INT32, n))
        tensors += [Tensor.of(kind, (B, 1, *shape), (4, 1, *shape)) for kind, *shape in shapes]
    assert plugin.call("workspace", tensors) == max(sizes) + 256, harness.log()


def test_bfloat16(harness: Harness, direct: DirectCaller) -> None:
    """The types of the node follow its first input."""
    states, attributes = states_of_heads("h2o", (64, 40), "float32")
    for state in states:
        state |= {name: bfloat16(state[name]) for name in ("key", "value")}
    assert_same(merge_through(Caller(harness), states, attributes), direct.ragged_merge_cache(states, attributes))
