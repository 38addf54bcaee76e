"""Lanes: what they ask of a backend, and when."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvexport.cache import CachePlan, LayerCache
from kvexport.runtime.lanes import Lanes

BUDGET, SLACK, CHUNK, EVERY = 8, 6, 4, 3


class Recorder:
    """A backend that notes its calls and counts slots as a cache would."""

    def __init__(self, lanes: int) -> None:
        self.used = np.zeros(lanes, np.int64)
        self.calls: list[tuple[list[list[int]], list[int]]] = []
        self.merges: list[tuple[int, int]] = []

    def decode(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64]) -> NDArray[np.float32]:
        counts = query_length[:, 0].tolist()
        self.calls.append(([ids[:n].tolist() for ids, n in zip(input_ids, counts, strict=True)], counts))
        self.used += query_length[:, 0]
        assert self.used.max() <= BUDGET + SLACK
        return np.zeros((len(counts), 1, 2), np.float32)

    def merge(self, first: int, last: int) -> None:
        self.merges.append((first, last))
        self.used[first:last] = np.minimum(self.used[first:last], BUDGET)

    def reset(self) -> None:
        self.used[:] = 0


def lanes_of(count: int) -> tuple[Lanes, Recorder]:
    layer = LayerCache(1, 4, 4, 1, BUDGET, BUDGET + SLACK, 1, 1, 0, True, "float32")
    recorder = Recorder(count)
    return Lanes(recorder, CachePlan((layer,)), count, prefill_chunk=CHUNK, merge_every=EVERY), recorder


def ids(*tokens: int) -> NDArray[np.int64]:
    return np.array(tokens, np.int64)


def test_lanes_that_are_due_together_merge_in_runs_of_neighbours() -> None:
    lanes, recorder = lanes_of(6)
    long, short = np.arange(BUDGET), np.arange(2)
    lanes.prefill([long, short, long, long, short, long])
    assert recorder.merges == []
    for step in range(1 + EVERY):  # a prompt's tokens count: the first step is over the budget, and the third after it
        lanes.append([ids(step)] * 6)
        assert recorder.merges == [(0, 1), (2, 4), (5, 6)] * (2 if step == EVERY else 1)
    assert lanes.length == [12, 6, 12, 12, 6, 12]
    assert recorder.used.tolist() == [8, 6, 8, 8, 6, 8]


def test_a_step_says_what_is_new_and_nothing_of_the_step_before() -> None:
    lanes, recorder = lanes_of(3)
    lanes.append([ids(5), ids(), ids(7)])
    lanes.append([ids(), ids(8), ids()])
    lanes.append([ids(1, 2), ids(3), ids()])
    lanes.append([ids(9), ids(9), ids(9)])
    assert recorder.calls == [
        ([[5], [], [7]], [1, 0, 1]),
        ([[], [8], []], [0, 1, 0]),
        ([[1, 2], [3], []], [2, 1, 0]),
        ([[9], [9], [9]], [1, 1, 1]),
    ]
    assert lanes.length == [4, 3, 2]
    lanes.reset()
    assert lanes.length == [0, 0, 0]


def test_no_cache_is_ever_over_full_whatever_comes() -> None:
    lanes, recorder = lanes_of(4)
    rng = np.random.default_rng(0)
    for _ in range(300):
        width = int(rng.integers(1, CHUNK + 1))
        counts = rng.integers(0, width + 1, 4)
        counts[rng.integers(4)] = width
        lanes.append([np.arange(n) for n in counts])
    assert len(recorder.merges) > 100


@pytest.mark.parametrize("count", [1, 3])
def test_a_call_brings_tokens_for_every_lane(count: int) -> None:
    lanes, recorder = lanes_of(2)
    lanes.append([ids(1), ids(2)])
    with pytest.raises(ValueError, match=f"for each of 2 sequences, not for {count}"):
        lanes.append([ids(3)] * count)
    assert len(recorder.calls) == 1 and lanes.length == [1, 1]


def test_a_call_of_no_token_or_of_too_many_is_refused() -> None:
    lanes, _ = lanes_of(1)
    for tokens in ([], range(CHUNK + 1)):
        with pytest.raises(ValueError, match=f"1 to {CHUNK} tokens"):
            lanes.append([np.array(tokens, np.int64)])
