"""Tests of the calls that lanes make to a backend."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvexport.backends.model_state import LaneState
from kvexport.engine.lanes import Lanes
from kvexport.plan.cache import CachePlan, LayerCache
from kvexport.recipe.fields import MOST
from kvexport.state.lane import Counters

BUDGET, SLACK, CHUNK, EVERY = 8, 6, 4, 3


class Recorder(LaneState):
    """A backend that records its calls and counts slots as a cache would."""

    def __init__(self, lanes: int, capacity: int = BUDGET + SLACK) -> None:
        self.used, self.capacity = np.zeros(lanes, np.int64), capacity
        self.calls: list[tuple[list[list[int]], list[int]]] = []
        self.firsts: list[int] = []  # the first lanes of the calls
        self.merges: list[tuple[int, int]] = []

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        counts = query_length[:, 0].tolist()
        self.calls.append(([ids[:n].tolist() for ids, n in zip(input_ids, counts, strict=True)], counts))
        self.firsts.append(first)
        assert 0 <= first <= first + len(counts) <= len(self.used)
        self.used[first : first + len(counts)] += query_length[:, 0]
        assert self.used.max() <= self.capacity
        return np.zeros((len(counts), 1, 2), np.float32)

    def merge(self, first: int, last: int) -> None:
        self.merges.append((first, last))
        self.used[first:last] = np.minimum(self.used[first:last], BUDGET)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        self.used[first:last] = 0


def lanes_of(count: int) -> tuple[Lanes, Recorder]:
    layer = LayerCache(4, 4, 1, (BUDGET,), (BUDGET + SLACK,), 1, (1,), 0, True, "float32")
    recorder = Recorder(count)
    return Lanes(recorder, CachePlan((layer,)), count, prefill_chunk=CHUNK, merge_every=EVERY), recorder


def lanes_that_read_whole_prompts(count: int) -> tuple[Lanes, Recorder]:
    capacity = 4 * CHUNK + BUDGET
    layer = LayerCache(4, 4, 1, (BUDGET,), (capacity,), 1, (1,), 0, True, "float32")
    recorder = Recorder(count, capacity)
    shared = {"prefill_chunk": CHUNK, "merge_every": EVERY}
    return Lanes(recorder, CachePlan((layer,)), count, **shared, merge_prompts="end"), recorder


def ids(*tokens: int) -> NDArray[np.int64]:
    return np.array(tokens, np.int64)


def test_lanes_that_are_due_together_merge_in_runs_of_neighbours() -> None:
    lanes, recorder = lanes_of(6)
    long, short = np.arange(BUDGET), np.arange(2)
    lanes.prefill([long, short, long, long, short, long])
    assert recorder.merges == []
    for step in range(1 + EVERY):  # a prompt's tokens count: the first step and the third one after it merge
        lanes.append([ids(step)] * 6)
        assert recorder.merges == [(0, 1), (2, 4), (5, 6)] * (2 if step == EVERY else 1)
    assert lanes.length == [12, 6, 12, 12, 6, 12]
    assert recorder.used.tolist() == [8, 6, 8, 8, 6, 8]


def test_a_prompt_merges_once_at_its_end_beside_any_neighbours() -> None:
    lanes, recorder = lanes_that_read_whole_prompts(3)
    lanes.prefill([np.arange(2 * CHUNK + 3), np.arange(5 * CHUNK), np.arange(BUDGET)])
    assert recorder.merges == [(0, 1), (1, 2)] and recorder.used.tolist() == [BUDGET] * 3
    assert len(recorder.calls) == 5, "the first ended in the third call, the second in the fifth"


def test_a_whole_prompt_counts_as_so_many_decoded_tokens() -> None:
    lanes, recorder = lanes_that_read_whole_prompts(1)
    lanes.prefill([np.arange(5 * CHUNK)])
    lanes.prefill([np.arange(EVERY - 1)])  # a question
    assert recorder.merges == [(0, 1)] and recorder.used.tolist() == [BUDGET + EVERY - 1]
    lanes.append([ids(1)])
    assert recorder.merges == [(0, 1)] * 2 and recorder.used.tolist() == [BUDGET]
    lanes.append([ids(2)])
    lanes.prefill([np.arange(EVERY)])
    assert recorder.merges == [(0, 1)] * 3


def test_a_prompt_without_room_merges_where_the_room_ends() -> None:
    lanes, recorder = lanes_that_read_whole_prompts(1)
    lanes.prefill([np.arange(8 * CHUNK)])  # the room for six chunks
    assert recorder.merges == [(0, 1)] * 2 and recorder.used.tolist() == [BUDGET]


@pytest.mark.parametrize("kind", [lanes_of, lanes_that_read_whole_prompts])
def test_no_lane_merges_before_its_announced_number_of_tokens(kind: Callable[[int], tuple[Lanes, Recorder]]) -> None:
    """In some cases the merge comes exactly after the announced number of tokens."""
    lanes, recorder = kind(1)
    rng, announced, exact = np.random.default_rng(1), list[int](), 0
    for _ in range(400):
        whole, decoded = rng.random() < 0.1, rng.random() < 0.8
        parts = [1] if decoded else [CHUNK] * int(rng.integers(0, 4)) + [int(rng.integers(1, CHUNK + 1))]
        for i, count in enumerate(parts):
            before = lanes.length[0]
            announced.append(before + lanes.before_merge(0))
            merges = len(recorder.merges)
            lanes.append([np.arange(count)], prefill=not decoded, unread=[0] if i + 1 < len(parts) else [])
            if len(recorder.merges) > merges:
                # The merge came before the call's tokens, if there was no room for them, or after them.
                at = before if recorder.used[0] == BUDGET + count else lanes.length[0]
                assert max(announced) <= at, (announced, at)
                exact += max(announced) == at
                announced.clear()
        if whole:
            lanes.clear()
            announced.clear()
    assert len(recorder.merges) > 20 and exact > 5


def test_a_step_passes_only_its_new_tokens() -> None:
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
    lanes.clear()
    assert lanes.length == [0, 0, 0]


def test_no_cache_exceeds_its_capacity_with_any_calls() -> None:
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


def test_a_call_of_some_lanes_leaves_the_others_out() -> None:
    lanes, recorder = lanes_of(4)
    lanes.append([ids(1, 2, 3), ids(4)], first=1, prefill=True)
    lanes.append([[5]], first=3)
    lanes.append([[6], (), [7]], first=0)
    assert list(zip(recorder.calls, recorder.firsts, strict=True)) == [
        (([[1, 2, 3], [4]], [3, 1]), 1),
        (([[5]], [1]), 3),
        (([[6], [], [7]], [1, 0, 1]), 0),
    ]
    assert lanes.length == [1, 3, 2, 1]
    lanes.clear(1, 3)
    assert lanes.length == [1, 0, 0, 1] and recorder.used.tolist() == [1, 0, 0, 1]


def test_no_cache_exceeds_its_capacity_as_lanes_change() -> None:
    lanes, recorder = lanes_of(5)
    rng = np.random.default_rng(1)
    cleared = 0
    for _ in range(600):
        first = int(rng.integers(5))
        last = int(rng.integers(first + 1, 6))
        if rng.random() < 0.1:
            lanes.clear(first, last)
            cleared += 1
            continue
        before = (list(lanes.length), recorder.used.copy())
        counts = rng.integers(0, CHUNK + 1, last - first)
        counts[0] = max(counts[0], 1)
        lanes.append([np.arange(n) for n in counts], first=first, prefill=bool(rng.integers(2)))
        for lane in {*range(5)} - {*range(first, last)}:
            assert (lanes.length[lane], recorder.used[lane]) == (before[0][lane], before[1][lane])
    assert cleared > 20 and len(recorder.merges) > 100


def test_a_sequence_ends_with_an_error_before_its_positions_run_out() -> None:
    lanes, recorder = lanes_of(2)
    lanes._set(0, Counters((BUDGET,), 0, MOST - BUDGET - SLACK - 3))
    recorder.used[0] = BUDGET
    lanes.append([ids(1, 2, 3), ids(4)])
    with pytest.raises(ValueError, match="longer than the cache was built for, or than positions, 2147483647"):
        lanes.append([ids(1), ids(4)])
    lanes.append([ids(), ids(5)])
    assert lanes.length == [MOST - BUDGET - SLACK, 2]


@pytest.mark.parametrize(
    ("window", "slots", "budget"),
    [(0, BUDGET, BUDGET), (BUDGET + 1, BUDGET, BUDGET), (BUDGET, 3 * CHUNK, np.inf)],
    ids=["no window", "fewer slots than the window", "a whole window"],
)
def test_slots_stand_for_tokens_where_tokens_that_the_model_sees_are_evicted(
    window: int, slots: int, budget: float
) -> None:
    """A head without evictions beside it does not count, and a whole window holds all that the model sees."""
    full = LayerCache(4, 4, 1, (100,), (100,), 1, (1,), 0, False, "float32")
    layer = LayerCache(4, 4, 1, (BUDGET,), (BUDGET + SLACK,), 1, (1,), window, True, "float32")
    lanes = Lanes(Recorder(1), CachePlan((full, layer)), 1, prefill_chunk=CHUNK, merge_every=EVERY)
    lanes.prefill([np.arange(3 * CHUNK)])
    assert (lanes.occupied(0), lanes.budget) == (slots, budget)
