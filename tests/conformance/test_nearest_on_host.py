"""The nearest targets of 16-bit keys, whose products are made on tensor cores (plugins/cuda/merge/nearest_mma.h), run
on the host: every edge of its tiles, each measure, keys that are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.conformance.comparison import assert_same_cache, state_of
from tests.conformance.cuda_library import STATE, Caller, float32_of
from tests.conformance.oracle import merge_cache
from tests.conformance.test_cuda_on_host import Arrays, assert_same_bits, merge_case, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture

STORED = {"float16": 2e-3, "bfloat16": 1e-2}  # of a mean that is rounded to the cache's type
# By the cosine, among targets of higher importance and then all; by the error and then the distance; in two passes of
# which recent slots receive.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("keepkv", {"zip": "vote", "order": "merge-first", "threshold": 0.5}),
    ("ballot", {}),
    ("zeromerge", {}),
]
every_method = pytest.mark.parametrize(("method", "parameters"), METHODS, ids=[name for name, _ in METHODS])


def in_float32(state: Arrays) -> Arrays:
    return {name: float32_of(x) if x.dtype == np.uint16 else x for name, x in state.items()}


def one_head(method: str, parameters: dict[str, Any], evicted: int, **settings: Any) -> tuple[Arrays, Any]:
    """A head of 300 slots, of which so many have to leave: the oracle's loops are slow."""
    state, attributes = merge_case(method, parameters, **settings)
    state = {name: (x[:1, :1, :, :300] if name == "score" else x[:1, :1, :300]).copy() for name, x in state.items()}
    return state, replace(attributes, budget=300 - evicted, recent=40)


def hold_to_oracle(caller: Caller, state: Arrays, attributes: Any, dtype: str) -> None:
    exact = {name: in_float32(state)[name].astype(np.float32) for name in ("key", "value")}
    expected = state_of(merge_cache(state | exact, attributes))
    actual = in_float32(state_of(caller.merge_cache(state, attributes)))
    assert_same_cache(actual, expected, attributes.method.statistics, single=1e-5, stored=STORED[dtype])


@every_method
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((8, 24), "float16"), ((40, 16), "bfloat16"), ((128, 128), "float16"), ((256, 256), "bfloat16")],
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}-and-{x[1]}",
)
def test_targets_are_those_of_the_meaning(
    caller: Caller, method: str, parameters: dict[str, Any], sizes: tuple[int, int], dtype: str
) -> None:
    """Rows that fill 64 elements and that do not, tiles of 128 and of 64 rows, several splits; slots in any order."""
    set_host(caller.library, multiprocessors=9)
    state, attributes = one_head(method, parameters, 16, in_order=sizes[0] != 40, dtype=dtype, sizes=sizes)
    hold_to_oracle(caller, state, attributes, dtype)


@pytest.mark.parametrize(("which", "evicted"), [(0, 1), (2, 33), (2, 65), (0, 150), (1, 1), (1, 17), (1, 33)])
def test_so_many_rows(caller: Caller, which: int, evicted: int) -> None:
    """One, one more than the warps of a block have when all have the same or two have, and more than a tile; an
    eviction pool of four rows, of 68 and of four more than a tile."""
    set_host(caller.library)
    hold_to_oracle(caller, *one_head(*METHODS[which], evicted, dtype="float16"), "float16")


@pytest.mark.parametrize("of", [np.arange(300) % 100, np.arange(300) // 3 * 3], ids=["far", "near"])
def test_a_key_is_at_no_distance_from_its_equal(caller: Caller, of: np.ndarray) -> None:
    """Every key and value stands in the cache three times: merging one into another costs nothing, exactly, so that
    those of the lowest positions are evicted, each into the first of its equals, which are in two splits or in one."""
    set_host(caller.library, multiprocessors=7)
    state, attributes = one_head("ballot", {}, 16, dtype="float16")
    for name in ("key", "value"):
        state[name] = state[name][:, :, of].copy()
    hold_to_oracle(caller, state, attributes, "float16")


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
