"""Tests of snapshots: a request continues from one as if it had not stopped, and damaged bytes are refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request, State
from kvexport.errors import KvexportError, SnapshotError, UsageError
from kvexport.language.grammar import Grammar
from kvexport.state.snapshot import Snapshot
from tests.support.answers import stopped
from tests.support.blobs import mutated

LONG = [3 * i % 60 for i in range(70)]  # beyond the budget of 32 slots
CHOICES: list[dict[str, Any]] = [
    {"max_new_tokens": 40},
    {"max_new_tokens": 40, "do_sample": True, "seed": 9, "repetition_penalty": 1.2},
    {
        "max_new_tokens": 40,
        "grammar": Grammar("regex", "([a-f]{3} )*([0-9]{5} ?)*"),
        "logit_bias": {5: 3.0},
        "frequency_penalty": 0.3,
    },
]


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact)


def run(engine: Engine, until: Callable[[], bool] = lambda: False) -> None:
    while engine.busy and not until():
        engine.step()


def answer(engine: Engine, request: Request) -> list[int]:
    engine.add(request)
    run(engine)
    if request.error is not None:
        raise request.error
    return [token.id for token in request.tokens]


def through_bytes(engine: Engine, snapshot: Snapshot) -> Snapshot:
    return Snapshot.from_bytes(snapshot.to_bytes(), engine.manifest)


@pytest.mark.parametrize("options", CHOICES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 39])
def test_a_stopped_request_continues_with_its_own_tokens(engine: Engine, options: dict[str, Any], tokens: int) -> None:
    expected = answer(engine, Request(LONG, engine.settings(**options)))
    text = engine.tokenizer.decode(expected) if engine.tokenizer else ""
    first = Request(LONG, engine.settings(**options), keep=True)
    engine.add(first)
    run(engine, lambda: len(first.tokens) == tokens and (tokens > 0 or first.done == 32))
    snapshot = stopped(engine, first)
    assert (first.state, first.finish_reason) == (State.FINISHED, "cancelled") and not engine.busy
    assert snapshot.length == (32 if tokens == 0 else len(LONG) + tokens - 1)
    answer(engine, Request([5] * 50, engine.settings(max_new_tokens=5)))  # the lane is given to another request
    second = Request((), start=through_bytes(engine, snapshot))
    rest = answer(engine, second)
    assert [token.id for token in first.tokens] + rest == expected
    assert "".join(token.text for token in [*first.tokens, *second.tokens]) == text
    assert second.finish_reason == "length"


def test_a_request_that_waits_is_stopped_as_well(engine: Engine) -> None:
    request = Request(LONG, engine.settings(max_new_tokens=4), keep=True)
    engine.add(request)
    snapshot = stopped(engine, request)
    assert snapshot.length == 0
    again = Request((), start=through_bytes(engine, snapshot))
    assert answer(engine, again) == answer(engine, Request(LONG, engine.settings(max_new_tokens=4)))
    assert not engine.cancel(again.id)


def test_the_next_turn_reads_the_new_tokens_alone(engine: Engine) -> None:
    settings = engine.settings(max_new_tokens=6)
    turns = [LONG[:40], LONG[40:45], LONG[45:], [1]]
    start, seen = None, 0
    for ids in turns:
        request = Request(ids, settings, start=start, keep=True)
        expected = answer(engine, Request(ids, settings, start=start))
        assert answer(engine, request) == expected
        assert request.cached_tokens == seen and request.timing.prompt_tokens == len(request.ids) - seen
        start, seen = through_bytes(engine, request.snapshot), request.snapshot.length
        assert start.ids.tolist() == [*request.ids.tolist(), *expected] and seen == len(start.ids) - 1


def test_an_ended_answer_continues_with_a_larger_limit(engine: Engine) -> None:
    expected = answer(engine, Request(LONG, engine.settings(max_new_tokens=20)))
    request = Request(LONG, engine.settings(max_new_tokens=8), keep=True)
    assert answer(engine, request) == expected[:8]
    with pytest.raises(UsageError, match="answer has ended: length"):
        engine.add(Request((), start=request.snapshot))
    longer = Request((), engine.settings(max_new_tokens=20), start=request.snapshot)
    assert answer(engine, longer) == expected[8:]


@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_forks_read_the_prompt_once_and_equal_solo_runs(tiny_artifact: Path, engine: Engine, lanes: int) -> None:
    own = load(tiny_artifact)
    own._scheduler.lanes = [None] * lanes
    answers_alone = [
        own.settings(max_new_tokens=n, do_sample=True, seed=seed) for n, seed in ((9, 0), (1, 1), (30, 2), (7, 3))
    ]
    expected = [answer(engine, Request(LONG, each)) for each in answers_alone]
    request = Request(LONG, answers_alone[0])
    requests = [request, *(request.fork(each) for each in answers_alone[1:])]
    read = 0
    for each in requests:
        own.add(each)
    append = own._pool.lanes.append if own._pool._lanes else None
    assert append is None
    while own.busy:
        own.step()
    assert [[token.id for token in each.tokens] for each in requests] == expected
    read = sum(each.timing.prompt_tokens for each in requests)
    assert read == len(LONG) and [each.cached_tokens for each in requests] == [0] + [len(LONG)] * 3
    assert request.prompt_end is None and not own._forks._parents


@pytest.mark.parametrize("when", [0, 1, 3, 5, 6, 8])
def test_forks_of_a_request_that_leaves_are_answered(tiny_artifact: Path, engine: Engine, when: int) -> None:
    own = load(tiny_artifact)
    own._scheduler.lanes = [None] * 2
    settings = own.settings(max_new_tokens=6)
    expected = answer(engine, Request(LONG, settings))
    request = Request(LONG, settings)
    forks = [request.fork() for _ in range(3)]
    for each in (request, *forks):
        own.add(each)
    for _ in range(when):
        own.step()
    own.cancel(request.id)
    run(own)
    assert [[token.id for token in each.tokens] for each in forks] == [expected] * 3
    assert sum(each.timing.prompt_tokens for each in forks) in (0, len(LONG))


# Snapshots from which no request can continue.


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["key", "value", "score"])
def test_a_snapshot_of_infinite_numbers_is_refused(
    engine: Engine, snapshot: Snapshot, number: float, kind: str
) -> None:
    name = next(name for name in snapshot.state if name.endswith(f".{kind}"))
    array = snapshot.state[name].copy()
    array.flat[3] = number
    with pytest.raises(SnapshotError, match=rf"past_key_values\.\d\.{kind} holds NaN or infinity"):
        through_bytes(engine, dataclasses.replace(snapshot, state={**snapshot.state, name: array}))


def test_a_snapshot_of_nan_fails_alone_and_leaves_a_clean_lane(engine: Engine, snapshot: Snapshot) -> None:
    bad = {name: np.full_like(array, np.nan) for name, array in snapshot.state.items() if name.endswith(".value")}
    poisoned = dataclasses.replace(snapshot, state={**snapshot.state, **bad})
    settings = engine.settings(max_new_tokens=9)
    expected = answer(engine, Request(LONG, settings))
    beside, failing = Request(LONG, settings), Request([1, 2], settings, start=poisoned, keep=True)
    engine.add(failing)
    assert answer(engine, beside) == expected
    assert failing.finish_reason == "error" and "is nan" in str(failing.error) and failing.snapshot is None
    following = [Request(LONG, settings) for _ in range(3)]
    for request in following:
        engine.add(request)
    run(engine)
    assert [[token.id for token in request.tokens] for request in following] == [expected] * 3


@pytest.fixture(scope="module")
def snapshot(engine: Engine) -> Snapshot:
    request = Request(LONG, engine.settings(max_new_tokens=12, do_sample=True, seed=3), keep=True)
    answer(engine, request)
    assert request.snapshot is not None
    return request.snapshot


@pytest.mark.parametrize("part", ["model", "recipe", "contract"])
def test_a_snapshot_of_another_origin_is_refused_by_name(engine: Engine, snapshot: Snapshot, part: str) -> None:
    other = dataclasses.replace(snapshot, origin=dataclasses.replace(snapshot.origin, **{part: "0" * 64}))
    for attempt in (lambda: through_bytes(engine, other), lambda: engine.add(Request([1], start=other))):
        with pytest.raises(SnapshotError, match=f"another {part}"):
            attempt()
    assert not engine.busy


def test_the_bytes_are_those_of_the_value(engine: Engine, snapshot: Snapshot) -> None:
    restored = through_bytes(engine, snapshot)
    assert restored.to_bytes() == snapshot.to_bytes()
    for name, array in snapshot.state.items():
        assert np.array_equal(restored.state[name], array) and restored.state[name].dtype == array.dtype
    assert restored.settings == snapshot.settings and restored.counters == snapshot.counters
    assert snapshot.nbytes < len(snapshot.to_bytes()) < snapshot.nbytes + 16384


@pytest.mark.parametrize("seed", range(3))
def test_no_changed_bytes_are_taken_for_a_snapshot(engine: Engine, snapshot: Snapshot, seed: int) -> None:
    data, rng = snapshot.to_bytes(), np.random.default_rng(seed)
    for _ in range(100):
        how, changed = mutated(data, rng)
        try:
            restored = Snapshot.from_bytes(changed, engine.manifest)
        except SnapshotError:
            continue
        # With recomputed digests the values may be changed, but nothing else: the snapshot can be run.
        assert how.startswith("resigned") or changed == data, how
        request = Request([1, 2], engine.settings(max_new_tokens=2), start=restored)
        try:
            answer(engine, request)
        except KvexportError:
            assert not engine.busy


@pytest.mark.parametrize(("change", "named"), [
    (lambda h: h["counters"].update(held=[0] * 4, added=0), "its counters say"),
    (lambda h: h["counters"].update(held=[60] * 4), "its counters say"),
    (lambda h: h["counters"].update(held=[32]), "counters of 1 KV heads"),
    (lambda h: h["counters"].update(length=10**6), "tokens seen"),
    (lambda h: h["counters"].update(added=-1), "is no count"), (lambda h: h["tensors"].reverse(), "past_key_values"),
    (lambda h: h["tensors"][1].update(name="x"), "is missing, or of no layer"),
    (lambda h: h["sampler"].update(generated=[1]), "not the last of its ids"),
    (lambda h: h["settings"].update(top_p=7.0), "top_p"), (lambda h: h.pop("text"), "text"),
])  # fmt: skip
def test_a_header_that_contradicts_the_artifact_is_refused(
    engine: Engine, snapshot: Snapshot, change: Any, named: str
) -> None:
    from tests.support.blobs import opened, signed

    header, payload = opened(snapshot.to_bytes())
    change(header)
    with pytest.raises(SnapshotError, match=named):
        Snapshot.from_bytes(signed(header, payload), engine.manifest)
    json.dumps(header)
