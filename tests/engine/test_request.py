"""Tests of a request's states: their order, and the effects of each change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvexport.engine.request import Bundle, Request, State
from kvexport.language.sampling import Sampler
from kvexport.language.settings import GenerationSettings


def prepared(length: int = 5, bundle: Bundle | None = None, **settings: Any) -> Request:
    request = Request([1] * length, bundle=bundle)
    ids = np.ones(length, np.int64)
    request.initialize(ids, Sampler(GenerationSettings(**settings), ids, 8), None)
    return request


def sampled(request: Request, token: int, max_length: int = 100) -> None:
    request.sampler.next(np.eye(8, dtype=np.float32)[token])
    request.take(token, max_length)


def decoding(**settings: Any) -> Request:
    request = prepared(**settings)
    request.begin(2)
    request.read(5)
    return request


def test_from_waiting_to_its_end() -> None:
    request = prepared(max_new_tokens=2)
    assert (request.state, request.lane, request.unread) == (State.WAITING, -1, 5)
    request.begin(3)
    assert (request.state, request.lane) == (State.PREFILLING, 3)
    request.read(4)
    assert (request.state, request.unread, request.done) == (State.PREFILLING, 1, 4)
    request.read(1)
    assert (request.state, request.unread) == (State.DECODING, 0)
    sampled(request, 6)
    assert request.state is State.DECODING
    sampled(request, 7)
    assert (request.state, request.finish_reason, request.error) == (State.FINISHED, "length", None)
    assert [(token.id, token.finish_reason) for token in request.tokens] == [(6, None), (7, "length")]


@pytest.mark.parametrize(
    ("settings", "max_length", "reason"), [({"eos_token_ids": (6,)}, 100, "stop"), ({}, 6, "length"), ({}, 7, None)]
)
def test_the_reasons_for_which_a_request_ends(settings: dict[str, Any], max_length: int, reason: str | None) -> None:
    request = decoding(**settings)
    sampled(request, 6, max_length)
    assert request.finish_reason == reason
    assert request.state is (State.FINISHED if reason else State.DECODING)


CHANGES: dict[str, Callable[[Request], None]] = {
    "begin": lambda request: request.begin(0),
    "read": lambda request: request.read(1),
    "take": lambda request: sampled(request, 1),
    "finish": lambda request: request.finish("cancelled"),
}
ALLOWED = {
    State.WAITING: {"begin", "finish"},
    State.PREFILLING: {"read", "finish"},
    State.DECODING: {"take", "finish"},
    State.FINISHED: set(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("state", State)
def test_no_other_change_is_possible(state: State, change: str) -> None:
    request = prepared()
    for step in ("begin", "read", "finish")[: list(State).index(state)]:
        request.read(5) if step == "read" else CHANGES[step](request)
    assert request.state is state
    if change in ALLOWED[state]:
        CHANGES[change](request)
        return
    with pytest.raises(ValueError, match="the request"):
        CHANGES[change](request)
    assert request.state is state


def test_no_more_of_a_prompt_is_read_than_there_is() -> None:
    request = prepared()
    request.begin(0)
    for count in (0, 6):
        with pytest.raises(ValueError, match="of a prompt that has 5 left"):
            request.read(count)


def test_a_request_is_added_once() -> None:
    request = prepared()
    with pytest.raises(ValueError, match="added once"):
        request.initialize(request.ids, request.sampler, None)


def test_requests_of_a_call_share_figures_and_new_tokens() -> None:
    bundle = Bundle()
    two = [prepared(bundle=bundle) for _ in range(2)]
    assert two[0].timing is two[1].timing is bundle.timing
    assert prepared().timing is not prepared().timing
    for request in two:
        request.begin(0)
        request.read(5)
        sampled(request, 4)
    assert list(bundle.new) == [request.tokens[0] for request in two]
    assert len({request.id for request in two}) == 2
