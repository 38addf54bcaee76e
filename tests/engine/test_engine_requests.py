"""Requests that join, leave, fail and end while others run. Each gets the answer that it would get alone."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request, State
from kvexport.errors import DeadlineError, KvexportError, UsageError

CHUNK, LANES = 16, 4  # the chunk and the lanes of the tiny artifact


@pytest.fixture(scope="module")
def solo(tiny_artifact: Path) -> Callable[..., list[int]]:
    """A function that returns the answer to a prompt that runs without others."""
    engine = load(tiny_artifact)
    known: dict[Any, list[int]] = {}

    def answer(ids: list[int], **settings: Any) -> list[int]:
        key = (tuple(ids), tuple(sorted(settings.items())))
        if key not in known:
            known[key] = engine.generate([ids], **settings)[0].token_ids
        return known[key]

    return answer


def answer_of(request: Request) -> list[int]:
    return [token.id for token in request.tokens]


def run(engine: Engine, steps: int = 10**6) -> None:
    while engine.busy and steps:
        engine.step()
        steps -= 1


def lane_bytes(engine: Engine, lane: int) -> list[bytes]:
    lanes: Any = engine._pool._lanes
    return [array[lane].tobytes() for array in [*lanes.state.state.values(), lanes.state.past_length]]


# Joining and leaving.


def test_a_long_prompt_joins_and_those_that_decode_go_on_between_its_chunks(
    tiny_artifact: Path, solo: Callable[..., list[int]]
) -> None:
    engine = load(tiny_artifact)
    engine.generate([[1], [2]], max_new_tokens=1)  # two lanes
    running = Request([5, 6, 7], engine.settings(max_new_tokens=40))
    engine.add(running)
    run(engine, 3)
    ids = list(range(60)) * 3  # 12 chunks
    long = Request(ids, engine.settings(max_new_tokens=5))
    engine.add(long)
    calls: list[tuple[int, ...]] = []
    lanes: Any = engine._pool._lanes
    decode = lanes.state.decode

    def watched(input_ids: Any, query_length: Any, first: int) -> Any:
        calls.append((*input_ids.shape, first))
        return decode(input_ids, query_length, first)

    lanes.state.decode = watched
    while not long.tokens:
        before = len(running.tokens)
        engine.step()
        assert len(running.tokens) == before + 1
    # No call of a chunk has a row for the lane that decodes.
    assert set(calls) == {(1, CHUNK, 1), (1, len(ids) % CHUNK, 1), (1, 1, 0)}
    run(engine)
    assert answer_of(long) == solo(ids, max_new_tokens=5)
    assert answer_of(running) == solo([5, 6, 7], max_new_tokens=40)


def test_lanes_are_as_many_as_ever_were_needed_at_once(
    tiny_artifact: Path, solo: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(tiny_artifact)
    counts: list[int] = []
    new = engine.model.new_state

    def counted(plan: Any, lanes: int) -> Any:
        counts.append(lanes)
        return new(plan, lanes)

    monkeypatch.setattr(engine.model, "new_state", counted)
    for _ in range(2):
        engine.generate([1, 2, 3], max_new_tokens=3)
    assert counts == [1]
    # While no request runs, lanes are made anew. Otherwise lanes are added by copying, and their number doubles.
    first, *others = (Request([n, n + 1], engine.settings(max_new_tokens=30)) for n in range(5))
    engine.generate([[1], [2]], max_new_tokens=2)
    assert counts == [1, 2]
    engine.add(first)
    run(engine, 5)
    for request in others:
        engine.add(request)
    run(engine, 1)
    assert counts == [1, 2] and engine._pool._lanes is not None and engine._pool._lanes.count == LANES
    run(engine)
    assert [answer_of(r) for r in (first, *others)] == [solo([n, n + 1], max_new_tokens=30) for n in range(5)]
    engine.generate([1, 2, 3], max_new_tokens=3)
    assert counts == [1, 2], "existing lanes stay"


def test_a_request_that_leaves_frees_its_lane_at_once_and_touches_no_other(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    requests = [Request(list(range(10 + n)), engine.settings(max_new_tokens=50)) for n in range(6)]
    for request in requests:
        engine.add(request)
    run(engine, 12)
    before = [lane_bytes(engine, lane) for lane in range(LANES)]
    assert engine.cancel(requests[1].id)
    assert not engine.cancel(requests[1].id), "the request has finished"
    assert engine.cancel(requests[5].id), "it waited"
    assert [lane_bytes(engine, lane) for lane in range(LANES)] == before
    engine.step()
    assert requests[4].lane == 1, "the next request starts with the next step"
    assert (requests[5].lane, requests[5].finish_reason, requests[5].tokens) == (-1, "cancelled", [])
    assert not engine.cancel(12345678)


def test_lanes_without_a_request_stay_as_they_are(tiny_artifact: Path, solo: Callable[..., list[int]]) -> None:
    engine = load(tiny_artifact)
    # Prompts of different tokens: the entries of equal ones are equally good targets of merges, and rounding decides.
    prompts = {n: [(n + 7 * i) % 50 + 1 for i in range(20)] for n in (3, 60, 50)}
    short, long, last = (Request(ids, engine.settings(max_new_tokens=n)) for n, ids in prompts.items())
    for request in (long, short, last):
        engine.add(request)
    while short.state is not State.FINISHED:
        engine.step()
    engine.step()  # the last lane moves to the place of the short request
    assert last.lane == 1
    ended = lane_bytes(engine, 2)
    run(engine)
    assert lane_bytes(engine, 2) == ended
    assert [answer_of(r) for r in (short, long, last)] == [solo(ids, max_new_tokens=n) for n, ids in prompts.items()]


def test_a_lane_whose_prompt_is_read_is_left_as_it_is_by_those_around_it_that_decode(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    first, last = (Request([n], engine.settings(max_new_tokens=60)) for n in (1, 2))
    between = Request(list(range(60)) * 2, engine.settings(max_new_tokens=5))
    for request in (first, between, last):
        engine.add(request)
    run(engine, 3)
    lanes: Any = engine._pool.lanes
    decode, seen = lanes.state.decode, []

    def watched(input_ids: Any, query_length: Any, start: int) -> Any:
        before = lane_bytes(engine, 1)
        logits = decode(input_ids, query_length, start)
        if input_ids.shape == (3, 1) and not query_length[1, 0]:
            seen.append(lane_bytes(engine, 1) == before)
        return logits

    lanes.state.decode = watched
    while between.unread:
        engine.step()
    assert len(seen) > 2 and all(seen)


def test_a_request_that_waits_too_long_ends(tiny_artifact: Path, solo: Callable[..., list[int]]) -> None:
    engine = load(tiny_artifact)
    running = [Request([n], engine.settings(max_new_tokens=8)) for n in range(LANES)]
    late = Request([9, 9], deadline=time.monotonic())
    for request in (*running, late):
        engine.add(request)
    assert engine.step()[0] is late
    assert late.finish_reason == "error" and isinstance(late.error, DeadlineError) and late.lane == -1
    run(engine)
    assert [answer_of(request) for request in running] == [solo([n], max_new_tokens=8) for n in range(LANES)]


def test_a_latency_budget_bounds_the_rows_of_a_call_of_prompts(
    tiny_artifact: Path, solo: Callable[..., list[int]]
) -> None:
    engine = load(tiny_artifact)
    running = Request([1], engine.settings(max_new_tokens=200))
    engine.add(running)
    run(engine, 2)
    prompts = [list(range(n, n + 40)) for n in range(3)]
    widths = []
    for budget in (1e-9, 1e9):
        engine.options = replace(engine.options, latency_budget=budget)
        requests = [Request(ids, engine.settings(max_new_tokens=3)) for ids in prompts]
        for request in requests:
            engine.add(request)
        done = 0
        while any(request.unread for request in requests):
            before, tokens = done, len(running.tokens)
            engine.step()
            done = sum(request.done for request in requests)
            widths.append(done - before)
            assert len(running.tokens) == tokens + 1
        while not all(request.state is State.FINISHED for request in requests):
            engine.step()
        assert [answer_of(request) for request in requests] == [solo(ids, max_new_tokens=3) for ids in prompts]
    assert widths[:9] == [16, 16, 8] * 3 and max(widths[9:]) == 3 * CHUNK


def test_a_stream_that_is_closed_frees_its_lanes(tiny_artifact: Path, solo: Callable[..., list[int]]) -> None:
    engine = load(tiny_artifact)
    stream = engine.stream([[1, 2], [3]], max_new_tokens=50)
    next(stream)
    assert len(engine._scheduler.running()) == 2
    stream.close()  # type: ignore[attr-defined]
    assert not engine.busy
    assert engine.generate([4, 5], max_new_tokens=8)[0].token_ids == solo([4, 5], max_new_tokens=8)


# Errors.


def poison(engine: Engine, lane: int) -> None:
    """Fill a lane with NaN, as an overflow of the model does, in used slots and others."""
    lanes: Any = engine._pool._lanes
    for name, array in lanes.state.state.items():
        if name.endswith((".key", ".value")):
            array[lane] = np.nan


def test_a_poisoned_lane_fails_alone(tiny_artifact: Path, solo: Callable[..., list[int]]) -> None:
    engine = load(tiny_artifact)
    prompts = [[n] * (5 + n) for n in range(3)]
    requests = [Request(ids, engine.settings(max_new_tokens=30)) for ids in prompts]
    for request in requests:
        engine.add(request)
    run(engine, 8)
    poison(engine, 1)
    advanced = engine.step()
    assert requests[1] in advanced and len(advanced) == 3
    failed = requests[1]
    assert (failed.state, failed.finish_reason) == (State.FINISHED, "error")
    assert isinstance(failed.error, KvexportError) and "is nan" in failed.error.problem
    assert answer_of(failed) == solo(prompts[1], max_new_tokens=30)[: len(failed.tokens)]
    # The lane is clean for the next request.
    following = Request([9, 9], engine.settings(max_new_tokens=30))
    engine.add(following)
    engine.step()
    assert following.lane == 1
    run(engine)
    assert answer_of(following) == solo([9, 9], max_new_tokens=30)
    assert [answer_of(requests[n]) for n in (0, 2)] == [solo(prompts[n], max_new_tokens=30) for n in (0, 2)]


def test_a_stream_raises_its_sequences_error_when_the_others_have_ended(
    tiny_artifact: Path, solo: Callable[..., list[int]]
) -> None:
    engine = load(tiny_artifact)
    stream = engine.stream([[1, 2, 3], [4, 5, 6]], max_new_tokens=20)
    answers: list[list[int]] = [[], []]
    with pytest.raises(KvexportError, match="is nan"):
        for n, token in enumerate(stream):
            answers[token.sequence].append(token.id)
            if n == 7:
                poison(engine, 0)
    assert answers[1] == solo([4, 5, 6], max_new_tokens=20)
    assert 0 < len(answers[0]) < 20
    assert not engine.busy


@pytest.mark.parametrize("interrupt", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_run_that_fails_ends_its_requests_and_no_others(
    tiny_artifact: Path, solo: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    engine = load(tiny_artifact)
    requests = [Request([n, 2], engine.settings(max_new_tokens=9)) for n in range(LANES + 1)]
    for request in requests:
        engine.add(request)
    run(engine, 4)
    run_session = engine.model.run  # type: ignore[attr-defined]

    def fails(*arguments: Any) -> None:
        raise interrupt

    monkeypatch.setattr(engine.model, "run", fails)
    with pytest.raises(type(interrupt)):
        engine.step()
    monkeypatch.setattr(engine.model, "run", run_session)
    assert [request.finish_reason for request in requests] == ["error"] * LANES + [None]
    assert all(isinstance(request.error, Exception) for request in requests[:LANES])
    run(engine)  # the request that waited
    assert answer_of(requests[-1]) == solo([LANES, 2], max_new_tokens=9)
    assert engine._requests == {}


def test_a_request_fails_if_no_lane_can_be_added(
    tiny_artifact: Path, solo: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(tiny_artifact)
    running, joins = (Request([n], engine.settings(max_new_tokens=20)) for n in (1, 2))
    engine.add(running)
    run(engine, 5)

    def full(lanes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine._pool._lanes.state, "grown", full)  # type: ignore[union-attr]
    engine.add(joins)
    with pytest.raises(MemoryError):
        engine.step()
    assert joins.finish_reason == "error"
    run(engine)
    assert answer_of(running) == solo([1], max_new_tokens=20)


def test_requests_that_cannot_be_added_are_refused(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    for prompt, problem in (
        ([], "the prompt is empty"),
        ([64], "out of range"),
        ([1] * 512, "the prompt has 512 tokens"),
    ):
        with pytest.raises(UsageError, match=problem):
            engine.add(Request(prompt))
    assert not engine.busy
    assert engine.step() == []
    engine.add(request := Request([1]))
    with pytest.raises(ValueError, match="added once"):
        engine.add(request)
