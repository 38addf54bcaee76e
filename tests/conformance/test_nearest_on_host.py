"""The search for the nearest targets of 16-bit keys on tensor cores (plugins/cuda/merge/nearest_mma.h), on the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvexport.methods import all_methods
from kvexport.ops.merge_cache import MergeCacheAttributes
from tests.conformance.comparison import assert_same_cache, state_of
from tests.conformance.cuda_library import STATE, Caller
from tests.conformance.oracle import merge_cache
from tests.conformance.test_cuda_on_host import Arrays, assert_same_bits, merge_case, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture

STORED = {"float32": 1e-5, "float16": 2e-3}  # of means rounded to the cache's type
# keepkv searches by the cosine, among targets of higher importance and then among all. ballot searches by the error and
# then by the distance. zeromerge searches in two passes, of which one has the recent slots.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("keepkv", {"zip": "vote", "order": "merge-first", "threshold": 0.5}),
    ("ballot", {}),
    ("zeromerge", {}),
]
every_method = pytest.mark.parametrize(("method", "parameters"), METHODS, ids=[name for name, _ in METHODS])


def one_head(method: str, parameters: dict[str, Any], evicted: int, **settings: Any) -> tuple[Arrays, Any]:
    """Return a head of 300 slots, `evicted` of which have to be evicted. The oracle's loops would be slow for more."""
    state, attributes = merge_case(method, parameters, **settings)
    state = {name: (x[:1, :1, :, :300] if name == "score" else x[:1, :1, :300]).copy() for name, x in state.items()}
    return state, replace(attributes, budget=300 - evicted, recent=40)


def hold_to_oracle(caller: Caller, state: Arrays, attributes: Any, dtype: str) -> None:
    exact = {name: state[name].astype(np.float32) for name in ("key", "value")}
    expected = state_of(merge_cache(state | exact, attributes))
    actual = state_of(caller.merge_cache(state, attributes))
    assert_same_cache(actual, expected, attributes.method.statistics, single=1e-5, stored=STORED[dtype])


@every_method
@pytest.mark.parametrize("sizes", [(8, 24), (40, 16), (128, 128), (256, 256)], ids=lambda x: f"{x[0]}-and-{x[1]}")
def test_targets_are_those_of_the_meaning(
    caller: Caller, method: str, parameters: dict[str, Any], sizes: tuple[int, int]
) -> None:
    """The caches have several splits, and slots are in any order."""
    set_host(caller.library, multiprocessors=9)
    state, attributes = one_head(method, parameters, 16, in_order=sizes[0] != 40, dtype="float16", sizes=sizes)
    hold_to_oracle(caller, state, attributes, "float16")


@pytest.mark.parametrize(("which", "evicted"), [(0, 1), (2, 33), (2, 65), (0, 150), (1, 1), (1, 17), (1, 33)])
def test_so_many_rows(caller: Caller, which: int, evicted: int) -> None:
    """The targets are right for any number of evicted rows.

    The numbers are one row; one row more than a tile has if all warps, or two warps, share the same rows; and more rows
    than a tile. Ballot's eviction pools have 4 rows, 68, and four more than a tile.
    """
    set_host(caller.library)
    hold_to_oracle(caller, *one_head(*METHODS[which], evicted, dtype="float16"), "float16")


@pytest.mark.parametrize("of", [np.arange(300) % 100, np.arange(300) // 3 * 3], ids=["far", "near"])
def test_a_key_is_at_no_distance_from_its_equal(caller: Caller, of: np.ndarray) -> None:
    """A key is at distance 0 from an equal key.

    Every key and value is in the cache three times, so merging one into another has no error. Those of the lowest
    positions are evicted, each into the first of its equals. The equals are in different splits or in one.
    """
    set_host(caller.library, multiprocessors=7)
    state, attributes = one_head("ballot", {}, 16, dtype="float16")
    for name in ("key", "value"):
        state[name] = state[name][:, :, of].copy()
    hold_to_oracle(caller, state, attributes, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("method", "parameters"), [("keepkv", {"threshold": 0.2}), ("ballot", {"attention": 0.0})])
def test_ties_go_to_the_first_slot(caller: Caller, method: str, parameters: dict[str, Any], dtype: str) -> None:
    """If several slots are equal the first one is evicted, or is the target, wherever it is.

    There are few different keys of one length, few values, all exact in every type, and few different importances. So
    equals are among the evicted slots, in the eviction pool, as important as some of the pool, more important, and
    recent. Some budgets leave no slot unprotected.
    """
    method_object = all_methods()[method](**parameters)
    for seed in range(24):
        rng = np.random.default_rng(seed)
        slots = int(rng.integers(20, 90))
        set_host(caller.library, multiprocessors=int(rng.integers(1, 9)))
        shape, now = (1, 1, slots), slots - 1
        state: Arrays = {name: np.zeros((*shape, 16), dtype) for name in ("key", "value")}
        for name in state:  # four elements of 1 or -1
            rows = [rng.permutation(np.repeat([1, -1, 0], [2, 2, 12])) for _ in range(int(rng.integers(3, 30)))]
            state[name][0, 0] = np.array(rows)[rng.integers(len(rows), size=slots)]
        state["votes"] = np.ones(shape, np.float32)
        state["position"] = rng.permutation(slots).astype(np.int32)[None, None]
        state["score"] = rng.integers(1, 6, (1, 1, len(method_object.statistics), slots)).astype(np.float32)
        if method == "ballot":  # ballot selects by the mean per observation
            state["score"][:, :, 0] *= now - state["position"] + 1
        budget, sinks = slots - int(rng.integers(1, slots // 2)), int(rng.integers(0, 5))
        recent = min(int(rng.integers(0, slots)), budget - sinks)
        attributes = MergeCacheAttributes(method_object, budget, sinks, recent)
        hold_to_oracle(caller, state, attributes, dtype)


@pytest.mark.parametrize("apart", [437, 1_000_000], ids=["in-two-windows", "each-in-one"])
def test_positions_are_as_far_apart_as_they_may_be(caller: Caller, apart: int) -> None:
    """Slots are sorted with one bit per position, in windows of 131,072 positions."""
    state, attributes = one_head("ballot", {}, 16, in_order=False, dtype="float16")
    state["position"] = state["position"] // 2 * apart + state["position"] % 2
    hold_to_oracle(caller, state, replace(attributes, recent=40 * apart), "float16")


@pytest.mark.parametrize("method", ["keepkv", "ballot"])
def test_no_bit_depends_on_how_much_shared_memory_there_is(caller: Caller, method: str) -> None:
    state, attributes = one_head(method, {}, 16, dtype="float16", sizes=(256, 256))
    results = []
    for limit in (75000, 232448):
        set_host(caller.library, shared_limit=limit)
        results.append(caller.merge_cache(state, attributes))
    set_host(caller.library)
    assert_same_bits(results)
    assert results[0].keys() == {f"present_{name}" for name in STATE}
