"""Tests of the scheduler without an engine, under random schedules and for all its rules."""

from typing import Any

import numpy as np
import pytest

from kvexport.engine.request import Bundle, Request, State
from kvexport.engine.scheduler import CALL_ROWS, MOVED_TOKENS, Schedule, Scheduler
from kvexport.language.sampling import Sampler
from kvexport.language.settings import GenerationSettings

CHUNK = 64


def request(length: int, answer: int = 3, bundle: Bundle | None = None, **more: Any) -> Request:
    new_request = Request([1] * length, bundle=bundle, **more)
    ids = np.ones(length, np.int64)
    new_request.initialize(ids, Sampler(GenerationSettings(max_new_tokens=answer), ids, 2), None)
    return new_request


def run(scheduler: Scheduler, step: Schedule) -> list[Request]:
    for each in step.prefill:
        each.read(scheduler.count(each))
    for each in (*(r for r in step.prefill if r.state is State.DECODING), *step.decode):
        each.sampler.generated.append(1)
        each.take(1, 10**6)
    return scheduler.update(step)


def finish(scheduler: Scheduler) -> list[Schedule]:
    steps = []
    while scheduler.busy:
        steps.append(scheduler.next())
        run(scheduler, steps[-1])
        assert len(steps) < 10_000
    return steps


def test_requests_get_the_lowest_free_lanes_in_the_order_of_arrival() -> None:
    scheduler = Scheduler(2, CHUNK)
    first, second, third = (request(5, answer) for answer in (1, 9, 1))
    for each in (first, second, third):
        scheduler.add(each)
    step = scheduler.next()
    assert list(step.admitted) == [first, second]
    assert [first.lane, second.lane] == [0, 1]
    assert run(scheduler, step) == [first]
    step = scheduler.next()
    assert list(step.admitted) == [third] and third.lane == 0
    assert list(step.prefill) == [third] and list(step.decode) == [second]


def test_a_long_prompt_does_not_hold_up_those_that_decode_nor_a_short_prompt() -> None:
    scheduler = Scheduler(4, CHUNK)
    running, long, short = request(5, 40), request(20 * CHUNK), request(CHUNK - 1)
    scheduler.add(running)
    run(scheduler, scheduler.next())
    scheduler.add(long)
    run(scheduler, scheduler.next())
    scheduler.add(short)
    waited = 0
    while long.state is State.PREFILLING:
        step = scheduler.next()
        assert running in step.decode, "it decodes between the chunks"
        assert running not in step.prefill
        run(scheduler, step)
        waited += not short.tokens
    assert waited <= 2


def test_neighbours_are_read_together_where_padding_is_cheaper_than_a_call() -> None:
    def first_call(*lengths: int) -> list[int]:
        scheduler = Scheduler(8, CHUNK)
        requests = [request(length) for length in lengths]
        for each in requests:
            scheduler.add(each)
        return [requests.index(each) for each in scheduler.next().prefill]

    assert first_call(500, 500, 500) == [0, 1, 2], "chunks of one length"
    assert first_call(40, 41, 30, 25) == [0, 1, 2, 3]
    assert first_call(CHUNK, CHUNK - CALL_ROWS, 500) == [0, 1, 2]
    assert first_call(CHUNK, CHUNK - CALL_ROWS - 1, 500) == [0], "the second costs less by itself"
    assert first_call(1, CHUNK, CHUNK) == [0]
    assert first_call(CHUNK - 5) == [0]


def test_the_prompts_of_a_call_are_read_before_any_of_its_requests_decodes() -> None:
    scheduler = Scheduler(3, CHUNK)
    bundle = Bundle()
    together, other = [request(n, 5, bundle) for n in (3 * CHUNK, 1, CHUNK)], request(2)
    scheduler.add(together[0])
    scheduler.add(together[1])
    scheduler.add(other)
    scheduler.add(together[2])  # it waits for another request's lane, and the running ones do not wait for it
    decoded: set[int] = set()
    for step in finish(scheduler):
        decoded |= {each.id for each in step.decode}
        if together[1].id in decoded and together[0] in step.prefill:
            raise AssertionError("it decoded before the first prompt was read")
    assert all(each.finish_reason == "length" for each in (*together, other))


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_leak_no_lane_and_starve_no_request(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(int(rng.integers(1, 6)), CHUNK)
    calls = [Bundle(), Bundle(), None, None, None]
    alive: list[Request] = []
    passed_over = 0
    for _ in range(400):
        if rng.random() < 0.3:
            alive.append(request(int(rng.integers(1, 5 * CHUNK)), int(rng.integers(1, 9)), calls[rng.integers(5)]))
            scheduler.add(alive[-1])
        if alive and rng.random() < 0.05:
            cancelled = alive.pop(int(rng.integers(len(alive))))
            cancelled.finish("cancelled")
            scheduler.remove(cancelled)
        step = scheduler.next()
        lanes = [each.lane for each in step.prefill]
        assert lanes == list(range(lanes[0], lanes[0] + len(lanes))) if lanes else True
        assert [each.lane for each in step.decode] == sorted(each.lane for each in step.decode)
        assert not {each.id for each in step.prefill} & {each.id for each in step.decode}
        for each in scheduler.running():
            assert scheduler.lanes[each.lane] is each and each in alive
            # A request that decodes, and belongs to no call of several prompts, decodes in every step.
            if each.state is State.DECODING and each.bundle is None:
                assert each in step.decode
        if waiting := [each for each in scheduler.running() if each.state is State.PREFILLING]:
            first = min(waiting, key=lambda each: (each.priority, each.id))
            passed_over = 0 if first in step.prefill else passed_over + 1
            assert passed_over <= 1, "the prompt that arrived first gets every second call"
        if scheduler.running():
            assert step.prefill or step.decode, "every step does something"
        for each in run(scheduler, step):
            alive.remove(each)
    for each in alive:
        assert each.state is not State.FINISHED
    finish(scheduler)
    assert scheduler.lanes == [None] * len(scheduler.lanes) and not scheduler.waiting
    assert all(each.finish_reason == "length" for each in alive)


def test_a_scheduler_without_requests_has_nothing_to_do() -> None:
    scheduler = Scheduler(2, CHUNK)
    assert not scheduler.busy
    step = scheduler.next()
    assert [list(part) for part in (step.admitted, step.prefill, step.decode, step.moved)] == [[], [], [], []]


def test_waiting_requests_start_by_priority_and_then_by_arrival() -> None:
    scheduler = Scheduler(1, CHUNK)
    requests = [request(1, 1, priority=priority) for priority in (0, 5, -1, 0, -1)]
    for each in requests:
        scheduler.add(each)
    order = [each for step in finish(scheduler) for each in step.admitted]
    assert [requests.index(each) for each in order] == [2, 4, 0, 3, 1]


def test_requests_expire_while_they_wait_and_not_later() -> None:
    scheduler = Scheduler(1, CHUNK)
    requests = [request(1, 9, deadline=deadline) for deadline in (5.0, 5.0, None, 9.0)]
    for each in requests:
        scheduler.add(each)
    scheduler.next()
    assert scheduler.expired(4.9) == []
    assert scheduler.expired(5.0) == [requests[1]]
    assert scheduler.expired(1e9) == [requests[1], requests[3]]


@pytest.mark.parametrize("decodes", [False, True])
def test_prompts_that_join_together_take_no_more_rows_than_others_may_wait_for(decodes: bool) -> None:
    def rows(limit: int | None) -> int:
        scheduler = Scheduler(8, CHUNK)
        scheduler.rows = limit
        if decodes:
            scheduler.add(request(1, 100))
            run(scheduler, scheduler.next())
        for _ in range(6):
            scheduler.add(request(10 * CHUNK))
        return len(scheduler.next().prefill) * CHUNK

    assert [rows(limit) for limit in (None, 10**6, 4 * CHUNK, 4 * CHUNK - 1, 0)] == [n * CHUNK for n in (6, 6, 4, 3, 1)]


def test_a_call_may_have_the_rows_of_one_chunk_with_any_bound() -> None:
    scheduler = Scheduler(8, CHUNK)
    scheduler.rows = 0
    for _ in range(5):
        scheduler.add(request(CHUNK // 2))
    assert [len(step.prefill) for step in finish(scheduler) if step.prefill] == [2, 2, 1]


@pytest.mark.parametrize("others", [1, 2, 7])
@pytest.mark.parametrize("later", range(4))
def test_a_short_prompt_is_read_by_the_next_call_and_long_ones_by_every_second_one(others: int, later: int) -> None:
    """A short prompt waits only for the running call, which has one chunk, whenever the prompt arrives."""
    scheduler = Scheduler(8, CHUNK)
    scheduler.rows = 0
    for _ in range(others):
        scheduler.add(request(200 * CHUNK))
    for _ in range(later):
        run(scheduler, scheduler.next())
    shorts = [request(CHUNK // 2 + 1, 1) for _ in range(20)]
    calls: list[Request] = []
    for short in shorts:
        scheduler.add(short)
        before = len(calls)
        while not short.tokens:
            (read,) = (step := scheduler.next()).prefill
            calls.append(read)
            run(scheduler, step)
        assert len(calls) - before == (1 if short is shorts[0] else 2), "no two short prompts run before a long one"
    assert len(set(calls[1::2])) == 1, "the prompt that arrived first"
    scheduler.add(again := request(1, 1))
    run(scheduler, scheduler.next())
    assert run(scheduler, scheduler.next()) == [again]


def read_order(lengths: list[int]) -> list[int]:
    """Return the numbers of the prompts in the order in which their chunks are read, one per call."""
    scheduler = Scheduler(len(lengths), CHUNK)
    scheduler.rows = 0
    requests = [request(length) for length in lengths]
    for each in requests:
        scheduler.add(each)
    return [requests.index(step.prefill[0]) for step in finish(scheduler) if step.prefill]


def test_equal_prompts_finish_in_the_order_of_arrival() -> None:
    assert read_order([3 * CHUNK] * 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_shorter_prompt_gets_every_second_call_until_it_ends() -> None:
    assert read_order([6 * CHUNK, 2 * CHUNK, 3 * CHUNK]) == [1, 0, 1, 0, 2, 0, 2, 0, 2, 0, 0]


def test_lanes_that_decode_become_a_prefix_one_lane_a_step() -> None:
    scheduler = Scheduler(6, CHUNK)
    requests = [request(1, answer) for answer in (100, 2, 3, 100, 100, 100)]
    for each in requests:
        scheduler.add(each)
    moves = []
    for _ in range(6):
        step = scheduler.next()
        assert [each.lane for each in step.decode] == sorted(each.lane for each in step.decode)
        moves += [(requests.index(each), step.source, each.lane) for each in step.moved]
        run(scheduler, step)
    assert moves == [(5, 5, 1), (4, 4, 2)]
    assert [each and requests.index(each) for each in scheduler.lanes] == [0, 5, 4, 3, None, None]


def test_a_lane_stays_if_it_ends_soon_or_a_request_waits_for_the_free_lane() -> None:
    scheduler = Scheduler(3, CHUNK)
    requests = [request(1, answer) for answer in (1, 100, MOVED_TOKENS + 1)]
    for each in requests:
        scheduler.add(each)
    run(scheduler, scheduler.next())
    scheduler.add(request(CHUNK * 2, 100))
    step = scheduler.next()
    assert not step.moved and step.admitted[0].lane == 0
    run(scheduler, step)
    scheduler.remove(step.admitted[0])
    run(scheduler, step := scheduler.next())
    assert not step.moved and step.decode == [requests[1], requests[2]]
