"""The CUDA kernels' source, run on the host: every phase over all threads, every block (plugins/cuda/core/block.h).

These tests go beyond the conformance suite: caches of many blocks and splits, all head and group sizes, all types, and
properties of the execution that the host can show. None of them uses a GPU.
"""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.methods import all_methods
from kvexport.methods.slots import Rotary, Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from plugins.building import make
from tests.conformance.cases import single_precision
from tests.conformance.comparison import assert_same_cache, assert_same_rows, state_of
from tests.conformance.cuda_library import (
    COUNTER_BYTES,
    EARLY,
    OTHER_LIBRARY,
    ROOT,
    STATE,
    Caller,
    HostMemory,
    Where,
    load,
    merge_cache_call,
    vote_attention_call,
)
from tests.conformance.oracle import merge_cache, vote_attention

Arrays = dict[str, np.ndarray]
ORDERS = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]  # the order of threads and blocks; whether copies are late
BOTH = (Statistic("probability", 0.98), Statistic("log_ema", 0.95))
WINDOWED = (Statistic("probability", 0.98, 5, 1.2), Statistic("log_ema", 0.95, 4, 1.2))


@pytest.fixture(scope="module")
def caller() -> Caller:
    try:
        library = load(Path(os.environ.get(OTHER_LIBRARY) or make.build("cuda-host")))
    except make.Missing as error:
        pytest.skip(f"not reached: {error}")
    set_host(library)
    return Caller(library, HostMemory())


def set_host(
    library: ctypes.CDLL, order: int = 0, late: int = 0, multiprocessors: int = 4, shared_limit: int = 101376
) -> None:
    library.kv_host_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
    library.kv_host_set(order, late, multiprocessors, shared_limit)


def inputs_of(
    heads: tuple[int, int],
    sizes: tuple[int, int],
    capacity: int,
    tokens: int,
    used: list[int],
    statistics: int,
    dtype: str = "float32",
    peak: float = 0.0,
) -> Arrays:
    """Return a ragged batch whose slots are in order of position, as appends and merges leave them.

    Empty slots hold arbitrary numbers. `peak` is the largest magnitude of a query times a key, or 0 for any.
    """
    rng = np.random.default_rng(7)
    batch, (query_heads, kv_heads), (key_size, value_size) = len(used), heads, sizes
    slots = (batch, kv_heads, capacity)
    x: Arrays = {
        "query": rng.normal(size=(batch, query_heads, tokens, key_size)) * 3,
        "key": rng.normal(size=(batch, kv_heads, tokens, key_size)),
        "value": rng.normal(size=(batch, kv_heads, tokens, value_size)),
        "past_key": rng.normal(size=(*slots, key_size)),
        "past_value": rng.normal(size=(*slots, value_size)),
    }
    if peak:
        every = np.concatenate([x["past_key"], x["key"]], axis=2).repeat(query_heads // kv_heads, axis=1)
        x["query"] *= peak / np.abs(x["query"] @ every.swapaxes(-1, -2)).max()
    x = {name: a.astype(dtype) for name, a in x.items()}
    votes = np.exp(rng.normal(size=slots)).astype(np.float32)
    votes *= np.arange(capacity) < np.array(used)[:, None, None]
    x |= {
        "past_votes": votes,
        "past_score": rng.gamma(1.0, size=(batch, kv_heads, statistics, capacity)).astype(np.float32),
    }
    x["past_position"] = np.broadcast_to(np.arange(capacity, dtype=np.int32) * 2, slots).copy()
    x["position"] = 2 * np.array(used)[:, None] + np.arange(tokens)
    x["query_length"] = np.array([[max(min(tokens, capacity - u) - (i == 1), 0)] for i, u in enumerate(used)])
    return x


def hold_to_oracle(
    caller: Caller, inputs: Arrays, attributes: VoteAttentionAttributes, tolerance: float = 1e-5, single: float = 2e-5
) -> None:
    compare(inputs, caller.vote_attention(inputs, attributes), attributes, tolerance, single)


def compare(
    inputs: Arrays, actual: Arrays, attributes: VoteAttentionAttributes, tolerance: float, single: float = 2e-5
) -> None:
    expected = vote_attention(inputs, attributes)
    np.testing.assert_allclose(
        actual["output"], expected["output"], rtol=0, atol=tolerance * max(1, np.abs(expected["output"]).max())
    )
    held = (np.asarray(expected["present_votes"]) > 0)[:, :, None]
    score = np.where(held, expected["present_score"], actual["present_score"])
    np.testing.assert_allclose(actual["present_score"], score, rtol=single, atol=single)
    for name in ("votes", "position"):
        right = np.asarray(expected[f"present_{name}"])
        assert (actual[f"present_{name}"][held[:, :, 0]] == right[held[:, :, 0]]).all(), name


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_first_launch_of_a_call_begins_in_order(
    caller: Caller, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program's kernel before a call may end before the kernels before it, so only later launches are early."""
    set_host(caller.library)
    inputs = inputs_of((4, 2), (16, 16), 300, tokens, [200, 37], 2)
    caller.vote_attention(inputs, VoteAttentionAttributes(0.25, 1.0, BOTH))
    launches = caller.library.kv_host_launches()
    assert launches > 1 and caller.library.kv_host_early() == 0
    monkeypatch.setattr(caller, "begin", EARLY)
    caller.vote_attention(inputs, VoteAttentionAttributes(0.25, 1.0, BOTH))
    assert (caller.library.kv_host_launches(), caller.library.kv_host_early()) == (launches, launches - 1)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 12, 16])
def test_decode_over_many_splits_for_every_group(caller: Caller, group: int) -> None:
    set_host(caller.library, multiprocessors=9)
    inputs = inputs_of((2 * group, 2), (16, 24), 900, 1, [899, 0, 511], 2)
    call = vote_attention_call(
        VoteAttentionAttributes(0.3, 1.0, BOTH), "float32", (3, 2 * group, 1, 16), (3, 2, 900, 16), 24
    )
    assert call.slots // call.heads // 128 > 1, "a cache of one split shows nothing"
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(0.3, 1.0, BOTH))


# Used slots of caches of 420 slots, in splits of one or two blocks of 32: all but one, none (twice, so that a case has
# a new token and another has none), all, a block less one, a block whose new token is in a split of its own, four
# blocks less one, four blocks, and three blocks less one.
EDGES = [419, 0, 0, 420, 31, 32, 127, 128, 95]


@pytest.mark.parametrize("group", range(1, 17))
def test_decode_of_16_bits_at_every_edge_of_a_split_for_every_group(caller: Caller, group: int) -> None:
    set_host(caller.library, multiprocessors=18)
    inputs = inputs_of((group, 1), (24, 16), 420, 1, [*EDGES[group % 4 :: 4], 419, 0, 32], 2, "float16")
    inputs["sink_logits"] = np.linspace(-1, 2, group).astype(np.float32)
    attributes = VoteAttentionAttributes(0.2, 0.7, BOTH, sliding_window=group % 3 * 150, softcap=group % 2 * 20.0)
    hold_to_oracle(caller, inputs, attributes, 2e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
@pytest.mark.parametrize(
    ("batch", "used", "heads"), [(1, 16383, 1), (256, 0, 2)], ids=["as-many-splits-as-there-are", "batch-of-256"]
)
def test_decode_of_the_largest_caches_and_batches(
    caller: Caller, dtype: str, tolerance: float, batch: int, used: int, heads: int
) -> None:
    set_host(caller.library, multiprocessors=150)
    lanes = [used or i % 40 for i in range(batch)]
    inputs = inputs_of((2 * heads, heads), (16, 16), max(lanes) + 1, 1, lanes, 2, dtype)
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(0.25, 1.0, BOTH), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
@pytest.mark.parametrize("group", [1, 6])
def test_decode_of_logits_of_200(caller: Caller, dtype: str, tolerance: float, group: int) -> None:
    set_host(caller.library)
    inputs = inputs_of((group, 1), (64, 64), 300, 1, [299, 40], 2, dtype, peak=200.0)
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(1.0, 1.0, BOTH), tolerance, single=single_precision(200.0))


@pytest.mark.parametrize("size", [8, 64, 72, 80, 96, 128, 136, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_every_head_size_and_type(caller: Caller, size: int, dtype: str, tokens: int) -> None:
    tolerance = {"float32": 1e-5, "float16": 2e-3}[dtype]
    set_host(caller.library)
    inputs = inputs_of((4, 2), (size, size), 300, tokens, [200, 37], 2, dtype)
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(size**-0.5, 1.0, BOTH), tolerance)


@pytest.mark.parametrize("tokens", [1, 2, 33, 70])
@pytest.mark.parametrize("statistics", [BOTH, WINDOWED, (Statistic(),)], ids=["both", "windowed", "none"])
def test_window_softcap_and_sinks(caller: Caller, tokens: int, statistics: tuple[Statistic, ...]) -> None:
    set_host(caller.library)
    inputs = inputs_of((6, 2), (16, 16), 330, tokens, [260, 250, 0, 330], len(statistics))
    inputs["sink_logits"] = np.linspace(-1, 2, 6).astype(np.float32)
    hold_to_oracle(caller, inputs, VoteAttentionAttributes(0.25, 0.6, statistics, sliding_window=90, softcap=15.0))


@pytest.mark.parametrize("tokens", [1, 45])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(caller: Caller, tokens: int, dtype: str) -> None:
    """No bit of the output depends on the order in which threads, blocks and late copies run.

    It would depend on it if a thread read a value that another writes in the same phase, if a block read the unfinished
    work of another, or if a stage was read before its copies arrive or overwritten while it is in use.
    """
    inputs = inputs_of((8, 2), (64, 32), 600, tokens, [555, 130, 300], 2, dtype)
    attributes = VoteAttentionAttributes(0.1, 1.0, BOTH, sliding_window=400)
    results = []
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append(caller.vote_attention(inputs, attributes))
    set_host(caller.library)
    assert_same_bits(results)


@pytest.mark.parametrize("shared_limit", [40000, 101376, 232448])
@pytest.mark.parametrize("heads", [(4, 4), (10, 2)], ids=["alone", "group5"])
def test_no_bit_depends_on_how_many_stages_fit(caller: Caller, shared_limit: int, heads: tuple[int, int]) -> None:
    inputs = inputs_of(heads, (128, 128), 500, 1, [480, 200], 2, "float16")
    results = []
    for limit in (101376, shared_limit):
        set_host(caller.library, late=1, shared_limit=limit)
        results.append(caller.vote_attention(inputs, VoteAttentionAttributes(0.1, 1.0, BOTH)))
    set_host(caller.library)
    assert_same_bits(results)


def assert_same_bits(results: list[Arrays]) -> None:
    for other in results[1:]:
        for name, x in other.items():
            assert x.tobytes() == results[0][name].tobytes(), name


@pytest.mark.parametrize("tokens", [1, 20])
def test_in_place_and_apart_give_the_same_bits(caller: Caller, tokens: int) -> None:
    inputs = inputs_of((4, 2), (32, 16), 300, tokens, [280, 0, 100], 2, "float16")
    attributes = VoteAttentionAttributes(0.1, 1.0, BOTH)
    assert_same_bits([caller.vote_attention(inputs, attributes, in_place=x) for x in (True, False)])


def test_the_largest_rows_and_groups_fit_the_smallest_device(caller: Caller) -> None:
    set_host(caller.library, shared_limit=101376)
    hold_to_oracle(
        caller, inputs_of((16, 1), (256, 256), 200, 1, [150], 1), VoteAttentionAttributes(0.05, 1.0, BOTH[1:])
    )
    hold_to_oracle(
        caller,
        inputs_of((16, 1), (256, 256), 200, 1, [150], 1, "float16"),
        VoteAttentionAttributes(0.05, 1.0, BOTH[1:]),
        2e-3,
    )
    hold_to_oracle(caller, inputs_of((16, 1), (256, 256), 60, 9, [30], 1), VoteAttentionAttributes(0.05, 1.0, BOTH[1:]))


# ---- merges ----

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {}),
    ("streaming", {}),
    ("snapkv", {}),
    ("keepkv", {"zip": "vote", "order": "merge-first", "threshold": 0.5}),
    ("keepkv", {"zip": "key", "order": "evict-first", "threshold": 0.2}),
    ("ballot", {}),
    ("ballot", {"order": "least-attended"}),
    ("zeromerge", {}),
    ("kvslimmer", {}),
    ("asymkv", {}),
    # Keys rotated by their places in the cache.
    ("streaming by place", {}),
    ("ballot by place", {}),
    ("kvslimmer by place", {}),
]
every_method = pytest.mark.parametrize(
    ("method", "parameters"), METHODS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)


def merge_case(
    method: str,
    parameters: dict[str, Any],
    *,
    in_order: bool = True,
    dtype: str = "float32",
    sizes: tuple[int, int] = (32, 32),
) -> tuple[Arrays, Any]:
    """Return caches of hundreds of slots, a tenth of which has to be evicted."""
    rng = np.random.default_rng(3)
    name, _, by_place = method.partition(" by ")
    method_object = all_methods()[name](**parameters)
    capacity, batch, heads, statistics = 420, 3, 2, len(method_object.statistics)
    slots = (batch, heads, capacity)
    centre = rng.normal(size=(8, sizes[0]))
    x: Arrays = {
        "key": centre[rng.integers(0, 8, slots)] + 0.4 * rng.normal(size=(*slots, sizes[0])),
        "value": rng.normal(size=(*slots, sizes[1])),
    }
    x = {name: a.astype(dtype) for name, a in x.items()}
    x["votes"] = np.where(rng.random(slots) < 0.7, 1.0, rng.integers(2, 5, slots)).astype(np.float32)
    x["votes"] *= np.arange(capacity) < np.array([420, 397, 200])[:, None, None]
    # Scores are so far apart that no rounding decides. The averages correspond to logits near 1.
    ranks = rng.permuted(np.broadcast_to(np.arange(capacity) / capacity, (batch, heads, statistics, capacity)), axis=-1)
    x["score"] = (ranks * 4.0 + 0.001).astype(np.float32)
    positions = np.sort(rng.choice(np.arange(4, 3000), size=capacity - 4, replace=False))
    x["position"] = np.broadcast_to(np.concatenate([np.arange(4), positions]).astype(np.int32), slots).copy()
    frequencies = tuple(float(2.0**-i) for i in range(8)) if method_object.rotary or by_place else ()
    rotary = Rotary(frequencies, cache_positions=bool(by_place))
    attributes = MergeCacheAttributes(method_object, 380, 4, 120, 0, rotary)
    if not in_order:
        for b, used in enumerate((420, 397, 200)):
            order = np.r_[rng.permutation(used), used:capacity]
            for name in STATE:
                x[name][b] = x[name][b][..., order] if name == "score" else x[name][b][:, order]
    return x, attributes


@every_method
@pytest.mark.parametrize("in_order", [True, False], ids=["in-order", "any-order"])
def test_merges_of_hundreds_of_slots_equal_the_meaning(
    caller: Caller, method: str, parameters: dict[str, Any], in_order: bool
) -> None:
    state, attributes = merge_case(method, parameters, in_order=in_order)
    actual, expected = (state_of(x(state, attributes)) for x in (caller.merge_cache, merge_cache))
    assert_same_cache(actual, expected, attributes.method.statistics, single=1e-5, stored=1e-5)
    assert_same_rows(actual, expected)


@pytest.mark.parametrize(
    ("method", "parameters"), [("h2o", {}), ("zeromerge", {}), ("asymkv", {})], ids=["h2o", "zeromerge", "asymkv"]
)
@pytest.mark.parametrize("levels", [1, 3])
def test_of_equals_the_earliest_leave(caller: Caller, method: str, parameters: dict[str, Any], levels: int) -> None:
    state, attributes = merge_case(method, parameters)
    state["score"] = np.floor(state["score"] / 4.01 * levels).astype(np.float32) + 1
    actual, expected = state_of(caller.merge_cache(state, attributes)), state_of(merge_cache(state, attributes))
    assert_same_cache(actual, expected, attributes.method.statistics, single=1e-5, stored=1e-5)


@every_method
def test_no_bit_of_a_merge_depends_on_the_order_of_threads_and_blocks(
    caller: Caller, method: str, parameters: dict[str, Any]
) -> None:
    for in_order in (True, False):
        state, attributes = merge_case(method, parameters, in_order=in_order, dtype="float16")
        results = []
        for order, late in ORDERS[:3]:
            set_host(caller.library, order, late)
            results.append(caller.merge_cache(state, attributes))
        set_host(caller.library)
        assert_same_bits(results)


@pytest.mark.parametrize("method", ["keepkv", "ballot", "zeromerge"])
def test_no_bit_of_a_merge_depends_on_how_its_work_is_shared_out(caller: Caller, method: str) -> None:
    """The division of a merge's work among blocks changes no bit of the result.

    The cases are more blocks per head than rows and one block for all heads, with much more slack than the merge evicts
    and without slack.
    """
    state, attributes = merge_case(method, {}, dtype="float16")
    for used in (420, 388):
        state["votes"] *= np.arange(420) < used
        results = []
        for multiprocessors in (1, 7, 150):
            set_host(caller.library, multiprocessors=multiprocessors)
            results.append(caller.merge_cache(state, attributes))
        assert_same_bits(results)
    set_host(caller.library)


@every_method
def test_a_merge_apart_equals_the_one_in_place_and_ends_in_zeros(
    caller: Caller, method: str, parameters: dict[str, Any]
) -> None:
    state, attributes = merge_case(method, parameters)
    inside, apart = (caller.merge_cache(state, attributes, in_place=x) for x in (True, False))
    used = (inside["present_votes"] > 0).sum(-1)
    assert used.tolist() == [[380, 380], [380, 380], [200, 200]]
    for b in range(3):
        n = int(used[b, 0])
        for name in STATE:
            a, i = apart[f"present_{name}"][b], inside[f"present_{name}"][b]
            rest = a[..., n:] if name == "score" else a[:, n:]
            assert (rest == 0).all(), f"{name}: rows after the budget"
            assert np.array_equal(
                a[..., :n] if name == "score" else a[:, :n], i[..., :n] if name == "score" else i[:, :n]
            ), name


@pytest.mark.parametrize("method", ["h2o", "ballot"])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_budget_of_16384_slots(caller: Caller, method: str, backwards: bool) -> None:
    """A merge to 16384 slots keeps the right positions, or the right sum of votes: the oracle would take minutes."""
    method_object, capacity, budget = all_methods()[method](), 16384 + 40, 16384
    rng, shape = np.random.default_rng(5), (1, 1, capacity)
    state = {name: rng.normal(size=(*shape, 8)).astype(np.float32) for name in ("key", "value")}
    state |= {"votes": np.ones(shape, np.float32), "position": np.arange(capacity, dtype=np.int32).reshape(shape)}
    state["score"] = np.stack([rng.permutation(capacity) / capacity + 0.5 for _ in method_object.statistics])[
        None, None
    ].astype(np.float32)
    if backwards:
        flipped = {name: x[:, :, :, ::-1] if name == "score" else x[:, :, ::-1] for name, x in state.items()}
        inputs = {name: np.ascontiguousarray(x) for name, x in flipped.items()}
    else:
        inputs = state
    actual = caller.merge_cache(inputs, MergeCacheAttributes(method_object, budget, 4, 1000))
    position = np.sort(actual["present_position"][0, 0, :budget])
    assert (np.diff(position) > 0).all()
    assert (actual["present_votes"][0, 0] > 0).sum() == budget
    if method == "h2o":
        free = state["score"][0, 0, 0].copy()
        free[:4] = free[-1000:] = np.inf
        assert (position == np.delete(np.arange(capacity), np.argsort(free)[:40])).all()
    else:
        assert budget < actual["present_votes"].sum() < capacity + 1e-2


def test_a_merge_within_the_budget_writes_nothing(caller: Caller) -> None:
    state, attributes = merge_case("keepkv", {})
    same = caller.merge_cache(state, replace(attributes, budget=420))
    assert all(same[f"present_{name}"].tobytes() == state[name].tobytes() for name in STATE)


# ---- the rest of the ABI ----


def test_the_workspace_is_used_up_to_its_size_and_its_counters_come_back_to_zero(caller: Caller) -> None:
    inputs = inputs_of((4, 2), (32, 32), 600, 1, [555, 130], 2)
    fresh = Caller(caller.library, HostMemory())
    fresh.vote_attention(inputs, VoteAttentionAttributes(0.1, 1.0, BOTH))
    assert not fresh.workspace[:COUNTER_BYTES].any()


@pytest.mark.parametrize(("change", "message"), [
    ({"cache_type": 9}, "none of float32, float16, int8, int4 and k8v4"),
    ({"query_type": 1}, "the query is of another type than the cache"), ({"query_heads": 5}, "not a multiple"),
    ({"query_heads": 64}, "more than 16 query heads"), ({"key_size": 10}, "16-byte vectors"),
    ({"key_size": 512}, "above 256"), ({"tokens": 700}, "more tokens than"), ({"statistics": 9}, "more than 8"),
])  # fmt: skip
def test_refusals_have_a_reason(caller: Caller, change: dict[str, int], message: str) -> None:
    call = vote_attention_call(VoteAttentionAttributes(0.1, 1.0, BOTH), "float32", (2, 4, 1, 32), (2, 2, 600, 32), 32)
    for name, value in change.items():
        setattr(call, name, value)
    with pytest.raises(RuntimeError, match=message):
        caller.prepared("vote_attention", call)


def test_a_workspace_that_is_too_small_is_refused(caller: Caller) -> None:
    call = merge_cache_call(merge_case("ballot", {})[1], "float32", (3, 2, 420, 32), 32, 2)
    for field in ("key", "value"):
        setattr(call.past, field, 256), setattr(call.present, field, 256)
    where = Where(None, 256, 1024)
    assert b"workspace is smaller" in caller.library.kv_cuda_merge_cache(call, where)


@pytest.mark.parametrize(("method", "first", "limit"), [("h2o", 7500, 40000), ("ballot", 12500, 65000)])
def test_calls_beyond_shared_memory_are_refused_before_a_launch(
    caller: Caller, method: str, first: int, limit: int
) -> None:
    """The library says beforehand whether a merge fits shared memory: a search for targets needs more."""
    method_object, ask = all_methods()[method](), caller.library.kv_cuda_merge_cache_problem
    ask.restype = ctypes.c_char_p
    set_host(caller.library, shared_limit=limit)
    refused = []
    for capacity in range(first, first + 200, 20):
        attributes = MergeCacheAttributes(method_object, capacity - 8, 4, 100)
        shape = (1, 1, capacity)
        state = {name: np.zeros((*shape, 8), np.float16) for name in ("key", "value")}
        state |= {"votes": np.zeros(shape, np.float32), "position": np.zeros(shape, np.int32)}
        state["score"] = np.zeros((1, 1, len(method_object.statistics), capacity), np.float32)
        call = merge_cache_call(attributes, "float16", state["key"].shape, 8, len(method_object.statistics))
        problem = ask(ctypes.byref(call))
        try:
            caller.merge_cache(state, attributes)
            assert problem is None, capacity
        except RuntimeError as error:
            assert problem and problem.decode() in str(error), capacity
            refused.append(capacity)
    set_host(caller.library)
    assert refused and refused[0] > first and refused[-1] == first + 180


def test_nothing_is_read_or_written_outside_of_any_buffer() -> None:
    """The sanitizers pass a sample of these and of `test_garbage.py`. Shared memory ends with the launch's size."""
    try:
        library = make.build("cuda-sanitized")
    except make.Missing as error:
        pytest.skip(f"not reached: {error}")
    runtimes = [
        subprocess.check_output(["g++", f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        OTHER_LIBRARY: str(library),
    }
    sample = "both-33 or largest_rows or any-order-ballot or any-order-kvslimmer or any-order-keepkv"
    sample += " or (head_size and (80 or 136)) or stages or (heads and many and float and 3) or call_for_each"
    sample += " or (few and (float16 and ballot or float32 and kvslimmer))"
    like_others = "h2o or streaming or snapkv or keepkv-key or least-attended or asymkv or alone"
    sample += f" or (garbage and not ({like_others}))"
    names = ("garbage", "cuda_quantized", "cuda_heads", "cuda_heads_merge")
    others = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", sample]
    command += [__file__, *others]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
