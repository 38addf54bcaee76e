"""The CUDA kernels' sum over ranks, compiled for the host, where ranks are threads.

The tests cover bits, sizes, the alternation of the two halves, and ranks that do not come. For runs on GPUs see
docs/tasks/tensor-parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.conformance.cuda_library import HOST, CudaOnHost, load
from tests.support.cuda_ranks import FAILED, LATE, OUT_OF_STEP, Ranks, in_order, multiprocessors, random_part

pytestmark = pytest.mark.skipif(CudaOnHost().available() is not None, reason=f"not reached: {CudaOnHost().available()}")
TYPES = ["float32", "float16", "uint16"]  # uint16: bits of bfloat16


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    all_ranks: list[Ranks] = []

    def make(count: int, **rest: Any) -> Ranks:
        all_ranks.append(Ranks(load(HOST), count, **rest))
        return all_ranks[-1]

    with multiprocessors():
        yield make
    for one in all_ranks:
        one.word[:] = FAILED  # releases all waiting ranks
        one.pool.shutdown()


def agree(threads: Ranks, parts: list[list[np.ndarray]]) -> None:
    got = threads.run(parts)
    assert threads.word[0] == 0
    for i, of_all in enumerate(zip(*parts, strict=True)):
        expected = in_order(of_all).tobytes()
        assert [sums[i].tobytes() == expected for sums in got] == [True] * len(parts), (i, of_all[0].size)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [2, 4])
def test_all_ranks_have_the_bits_of_the_sum_in_their_order(ranks: Any, dtype: str, count: int) -> None:
    """All ranks get the bits of the sum in rank order.

    Some sizes fill no vector or no block, others several blocks. Both halves alternate hundreds of times.
    """
    rng = np.random.default_rng(count)
    sizes = [1, 7, 576, 4096, 4099, 70_001, *rng.integers(1, 9000, 300)]
    agree(ranks(count), [[random_part(rng, size, dtype) for size in sizes] for _ in range(count)])


def test_more_than_a_mailbox_holds_goes_in_pieces_in_one_shot_and_in_two(ranks: Any) -> None:
    rng = np.random.default_rng(0)
    for count in (2, 3):
        agree(ranks(count), [[random_part(rng, 1_300_003, "float16"), random_part(rng, 5, "float16")] * 2] * count)


def test_tensors_at_any_address_and_sums_in_place(ranks: Any) -> None:
    rng = np.random.default_rng(0)
    whole = [random_part(rng, 1001, "float32") for _ in range(2)]
    agree(ranks(2), [[part[1:]] for part in whole])
    threads, parts = ranks(2), [part.copy() for part in whole]

    def in_place(rank: int) -> str:
        address = parts[rank].ctypes.data
        return str(threads.sum(threads.views[rank], "float32", address, address, 1001, 0))

    assert list(threads.pool.map(in_place, range(2))) == ["", ""]
    assert all(part.tobytes() == in_order(whole).tobytes() for part in parts)


def test_a_late_rank_is_named_and_waits_have_an_end(ranks: Any) -> None:
    threads = ranks(2, patience=20_000_000)
    threads.run([[np.zeros(9, np.float32)]])
    assert threads.word[0] == LATE | 0 << 8 | 1 << 16
    threads.run([[np.zeros(9, np.float32)]])  # ends without a wait


def test_a_waiting_rank_stops_at_a_problem_word(ranks: Any) -> None:
    threads = ranks(2)
    with ThreadPoolExecutor(1) as other:
        alone = other.submit(threads.run, [[np.zeros(9, np.float32)]])
        threads.word[0] = FAILED
        alone.result()
    assert threads.word[0] == FAILED


@pytest.mark.parametrize("sizes", [(4, 5), (4, 40_000), (100_000, 90_000)])
def test_ranks_that_sum_different_tensors_fail(ranks: Any, sizes: tuple[int, int]) -> None:
    threads = ranks(2)
    threads.run([[np.zeros(size, np.float32)] for size in sizes])
    assert threads.word[0] & 255 == OUT_OF_STEP


def test_invalid_calls_are_refused(ranks: Any) -> None:
    threads = ranks(2)
    view, x = threads.views[0], np.zeros(2 << 20, np.float32)
    at = x.ctypes.data
    assert threads.sum(view, "int8", at, at, 4, 0) == "only float32, float16 and bfloat16 are added up"
    assert threads.sum(view, "float32", at, at, 0, 0) == ""
    with multiprocessors(8):
        assert "more blocks, which wait for those of other devices" in threads.sum(view, "float32", at, at, x.size, 0)
    view.mailbox[1] = None
    assert threads.sum(view, "float32", at, at, 4, 0) == "a rank has no mailbox"
    view.rank = 2
    assert threads.sum(view, "float32", at, at, 4, 0) == "the rank is none of the ranks"
    view.count = 17
    assert threads.sum(view, "float32", at, at, 4, 0) == "there are no ranks, or more than 16"
