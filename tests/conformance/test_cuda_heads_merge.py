"""The CUDA kernels of MergeCache over KV heads of several capacities and budgets, run on the host.

A merge of up to 32 heads is as many launches as one of heads of one budget. The conformance suite (test_heads.py)
has three heads and compares every method with a merge of each head. Here are more heads than a launch takes, budgets
above and far below the slots, all types, and properties that the host can show.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.schema.state import STATE_NAMES
from tests.conformance.cases import BY_PLACE, MergeProfile, MergeScenario, merge_cache_state
from tests.conformance.cuda_library import Caller, Where, host_list, merge_cache_call
from tests.conformance.layout import joined
from tests.conformance.test_cuda_on_host import ORDERS, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture

Arrays = dict[str, np.ndarray]
FEW = (420, 16, 150, 90)
MANY = (*FEW, *range(40, 73))
TYPES = ("float32", "float16")
METHODS = {
    "h2o": MergeProfile("h2o", "h2o"),
    "keepkv": MergeProfile("keepkv", "keepkv", {"zip": "vote", "order": "merge-first", "threshold": 0.5}),
    "ballot": MergeProfile("ballot", "ballot", sizes=(16, 24)),
    "zeromerge": MergeProfile("zeromerge", "zeromerge"),
    "kvslimmer": MergeProfile("kvslimmer", "kvslimmer", rotary=BY_PLACE),
}
every_method = pytest.mark.parametrize("method", METHODS)


def heads_of(
    method: str, capacities: Sequence[int], dtype: str = "float32", sizes: tuple[int, int] = (16, 24)
) -> tuple[list[Arrays], list[MergeCacheAttributes]]:
    profile, states, attributes = replace(METHODS[method], kv_heads=1, sizes=sizes, dtype=dtype), [], []
    for h, capacity in enumerate(capacities):
        budget = max(7, int(capacity * (0.9, 0.5, 1.0)[h % 3]))
        used = tuple((x,) for x in (capacity, 0, capacity // 2, capacity - 5))
        states.append(merge_cache_state(profile, MergeScenario(f"{method} {h}", capacity, budget, used)))
        attributes.append(replace(profile.attributes(budget), recent=h % 5))
    return states, attributes


def call_of(method: str, capacities: Sequence[int], budgets: Sequence[int], batch: int = 1, size: int = 128) -> Any:
    """Return a merge of float16 caches over KV heads with these slots and budgets, without its pointers."""
    attributes = replace(METHODS[method].attributes(1), recent=64)
    shape, every = (batch, len(capacities), max(capacities), size), [replace(attributes, budget=x) for x in budgets]
    return merge_cache_call(every, "float16", shape, size, len(attributes.method.statistics), capacities)


def assert_same_heads(ones: Sequence[Arrays], others: Sequence[Arrays]) -> None:
    for h, (one, other) in enumerate(zip(ones, others, strict=True)):
        for name, x in one.items():
            assert x.tobytes() == other[name].tobytes(), f"{name} of head {h}"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("capacities", [FEW, MANY], ids=["few", "many"])
@every_method
def test_heads_of_several_capacities_give_the_bits_of_a_merge_of_each(
    caller: Caller, method: str, dtype: str, capacities: tuple[int, ...]
) -> None:
    states, attributes = heads_of(method, capacities, dtype)
    expected = [caller.merge_cache(state, own) for state, own in zip(states, attributes, strict=True)]
    for multiprocessors in (1, 7, 150):  # other divisions of the work
        set_host(caller.library, multiprocessors=multiprocessors)
        assert_same_heads(caller.merge_cache_of(states, attributes), expected)
    set_host(caller.library)
    changed = [
        h for h, state in enumerate(states) if state["votes"].tobytes() != expected[h]["present_votes"].tobytes()
    ]
    assert set(changed) >= {h for h in range(len(states)) if h % 3 < 2 and capacities[h] > 16}


@pytest.mark.parametrize("method", ["keepkv", "zeromerge"])
def test_small_heads_beside_a_large_one_have_no_more_splits_than_blocks(caller: Caller, method: str) -> None:
    """The search of each head has its own number of blocks, and its splits have results within its own stride."""
    rng, capacities, states, attributes = np.random.default_rng(1), (1100, 260, 260, 260, 260), [], []
    for slots in capacities:
        own, shape = METHODS[method].attributes(slots - 16), (4, 1, slots)
        state = {name: rng.normal(size=(*shape, 16)).astype(np.float32) for name in ("key", "value")}
        state |= {"votes": np.ones(shape, np.float32), "position": np.tile(np.arange(slots, dtype=np.int32), (4, 1, 1))}
        score = np.tile(np.linspace(-3, 3, slots, dtype=np.float32), (4, 1, len(own.method.statistics), 1))
        states.append(state | {"score": rng.permuted(score, axis=-1)})
        attributes.append(own)
    expected = [caller.merge_cache(state, own) for state, own in zip(states, attributes, strict=True)]
    for multiprocessors in (5, 13, 20, 30, 60):
        set_host(caller.library, multiprocessors=multiprocessors)
        assert_same_heads(caller.merge_cache_of(states, attributes), expected)
    set_host(caller.library)


@pytest.mark.parametrize("dtype", TYPES)
@every_method
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(caller: Caller, method: str, dtype: str) -> None:
    states, attributes = heads_of(method, FEW, dtype)
    results = []
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append(caller.merge_cache_of(states, attributes))
    set_host(caller.library)
    for other in results[1:]:
        assert_same_heads(results[0], other)


@every_method
def test_a_merge_apart_equals_the_one_in_place_and_ends_in_zeros(caller: Caller, method: str) -> None:
    states, attributes = heads_of(method, MANY)
    inside, apart = (caller.merge_cache_of(states, attributes, in_place=x) for x in (True, False))
    for one, other in zip(inside, apart, strict=True):
        for b in range(4):
            n = int((one["present_votes"][b] > 0).sum())
            for name in STATE_NAMES:
                i, a = (np.moveaxis(x[f"present_{name}"][b, 0], name == "score", 0) for x in (one, other))
                assert (a[n:] == 0).all() and a[:n].tobytes() == i[:n].tobytes(), name


# ---- refusals ----


@pytest.mark.parametrize(("change", "message"), [
    ({"capacity": (420, 16, 150, 91)}, "more or fewer slots than the state"), ({"key_size": 10}, "16-byte vectors"),
    ({"cache_type": 3}, "no kernel that merges a quantized cache"), ({"batch": 40_000}, "more than 65536 KV heads"),
    ({"capacity": (420, 16, 0, 90)}, "a KV head has no slots"),
    ({"budget": (15, 15, 0, 15)}, "budget, sinks, recent or sliding_window is out of range"),
    ({"recent": (64, 64, -1, 64)}, "budget, sinks, recent or sliding_window is out of range"),
])  # fmt: skip
def test_refusals_have_a_reason(caller: Caller, change: dict[str, Any], message: str) -> None:
    call = call_of("ballot", FEW, [15] * len(FEW), size=16)
    for name, value in change.items():
        host_list(call, name, value) if isinstance(value, tuple) else setattr(call, name, value)
    with pytest.raises(RuntimeError, match=message):
        caller.prepared("merge_cache", ctypes.byref(call))


def test_a_tensor_that_is_not_aligned_and_a_small_workspace_are_refused_before_anything_is_written(
    caller: Caller,
) -> None:
    states, attributes = heads_of("ballot", FEW)
    state, _ = joined(states)
    held = {name: caller.memory.put(x) for name, x in state.items()}
    shape = (4, len(FEW), max(FEW), 16)
    call = merge_cache_call(attributes, "float32", shape, 24, state["score"].shape[1], FEW)
    call.past = call.present = caller.state(held)
    where = Where(None, caller.memory.address(caller.workspace), 1024, None, 0)
    assert b"workspace is smaller" in caller.library.kv_cuda_merge_cache(ctypes.byref(call), ctypes.byref(where))
    call.present.value += 4
    with pytest.raises(RuntimeError, match="a tensor is not aligned to 16 bytes"):
        caller.prepared("merge_cache", ctypes.byref(call))()
    assert all((held[name] == x).all() for name, x in state.items())


@pytest.mark.parametrize("limit", [40000, 60000, 101376])
def test_a_cache_beyond_shared_memory_is_refused_for_the_largest_head(caller: Caller, limit: int) -> None:
    """The library refuses the heads together if and only if it refuses one of them."""
    ask = caller.library.kv_cuda_merge_cache_problem
    ask.restype = ctypes.c_char_p
    refused = set()
    for capacity in (600, 6000, 7800, 9000, 15000, 21000):
        call = call_of("h2o", (64, capacity), (32, capacity - 8), size=8)
        one = call_of("h2o", (capacity,), (capacity - 8,), size=8)
        set_host(caller.library, shared_limit=limit)
        problem = ask(ctypes.byref(call))
        assert problem == ask(ctypes.byref(one))
        refused.add(problem is not None)
    set_host(caller.library)
    assert refused == {True, False}
